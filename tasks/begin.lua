-- Note that a run's next operation is about to run alone: if this worker dies now, it is what killed it.
-- ARGV: 1 tenant, 2 run id, 3 token, 4 seq.  returns 1, or 0 if the token isn't the run's or this isn't its next
local run_key = K.run(ARGV[1], ARGV[2])
local run = redis.call('HMGET', run_key, 'token', 'applied')
if run[1] ~= ARGV[3] or run[2] + 1 ~= tonumber(ARGV[4]) then
  return 0
end
redis.call('HSET', run_key, 'begun', ARGV[4])
return 1
