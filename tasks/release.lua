-- Hand a run back: nobody owns it, and its last token commits nothing any more.
-- ARGV: 1 tenant, 2 run id, 3 token.  returns 1, or 0 if the token isn't the run's
local run = K.run(ARGV[1], ARGV[2])
if redis.call('HGET', run, 'token') ~= ARGV[3] then
  return 0
end
redis.call('HSET', run, 'owner', '', 'generation', '', 'token', '', 'begun', '')
return 1
