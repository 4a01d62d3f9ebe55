-- Take, renew or end a worker's lease. Taking it makes every earlier process of that name an impostor.
-- The last sign of life outlasts the lease, so that a process that hangs can be told from one that never came up.
-- ARGV: 1 verb: take | renew | end, 2 worker id, 3 generation, 4 milliseconds, then name, value of each field
-- returns 1, or 0 if this process doesn't hold it
local verb, id, lease = ARGV[1], ARGV[2], K.worker(ARGV[2])
if verb == 'take' then
  redis.call('DEL', lease)
  redis.call('HSET', lease, 'generation', ARGV[3], 'started', clock())
  redis.call('SADD', K.WORKERS, id)
elseif not holds(id, ARGV[3]) then
  return 0
end
if verb == 'end' then
  redis.call('DEL', lease)
  redis.call('SREM', K.WORKERS, id)
  redis.call('HDEL', K.SIGNS, id)
  return 1
end
for i = 5, #ARGV, 2 do
  redis.call('HSET', lease, ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', lease, ARGV[4])
redis.call('HSET', K.SIGNS, id, (redis.call('HGET', lease, 'pid') or '') .. ' ' .. clock())
return 1
