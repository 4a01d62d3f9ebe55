-- Note that a result was given to its client; from the first time on it is kept for a shorter while.
-- ARGV: 1 tenant, 2 request id, 3 how long it is kept now.  returns 1 the first time, else 0
local future = K.future(ARGV[1], ARGV[2])
local known = redis.call('HMGET', future, 'state', 'result')
if not known[1] or known[1] == 'pending' or redis.call('HSETNX', future, 'delivered', clock()) == 0 then
  return 0
end
redis.call('PEXPIRE', future, math.floor(ARGV[3] * 1000))
if known[2] and string.sub(known[2], 1, 1) == '@' then
  redis.call('ZADD', K.FILES, clock() + ARGV[3], known[2])
end
return 1
