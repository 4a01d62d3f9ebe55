"""One base model in memory, as trainer and sampler both need it.

Loading, the linear layer that serves adapters of many runs at once, attention over packed sequences and over
a cache, log-probabilities without a whole logits matrix. No losses, no optimizer, no drawing of tokens.
Importing the package itself doesn't import torch.
"""
