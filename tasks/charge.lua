-- Take tokens from what a tenant may use in this minute: those drawn for samples that were cancelled meanwhile.
-- ARGV: 1 tenant, 2 tokens
use_tokens(ARGV[1], tonumber(ARGV[2]), clock())
