-- Give a further client of a sampler its number; the first client is 0. Given twice, a number is only skipped.
-- ARGV: 1 tenant, 2 sampler id.  returns the number, or 0 if there is no such sampler
local sampler = K.sampler(ARGV[1], ARGV[2])
if redis.call('HEXISTS', sampler, 'record') == 0 then
  return 0
end
return redis.call('HINCRBY', sampler, 'clients', 1)
