-- Leave the line for good under this seat's name, and a turn that was granted without the seat having heard of it: it has brought nothing in.
-- ARGV: 1 base, 2 owner, 3 name of the seat.  returns 1
local row = owner_key(ARGV[2])
redis.call('HSET', row, 'withdrawn', ARGV[3])
redis.call('EXPIRE', row, KEPT_OWNER_S)
if redis.call('HGET', base, 'owner') == ARGV[2] and redis.call('HGET', base, 'seat') == ARGV[3] then
  finish('unused')
end
if redis.call('ZREM', LINE, ARGV[2]) == 1 then
  redis.call('HDEL', SEEN, ARGV[2])
  redis.call('PUBLISH', base, 'left')
end
return 1
