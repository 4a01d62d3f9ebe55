-- Give back every sampling request that this sampler process holds.
-- ARGV: 1 slug, 2 worker id, 3 its generation.  returns the number given back
return give_back(ARGV[1], ARGV[2] .. '/' .. ARGV[3])
