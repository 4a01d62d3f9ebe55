-- Stand in line for an accelerator, and take it if it is free and this owner is next. Asked again, the same answer.
-- ARGV: 1 base, 2 owner, 3 name of this very seat, 4 holder (JSON), 5 least quantum and 6 its multiple of a switch
-- returns the token as text, or '' while others are before, or once this seat was withdrawn
local owner, seat = ARGV[2], ARGV[3]
local turn = redis.call('HMGET', base, 'token', 'owner', 'seat')
if turn[2] and turn[3] == seat then
  return turn[1]
elseif redis.call('HGET', owner_key(owner), 'withdrawn') == seat then
  return ''  -- it comes late: whoever sent it has left
end
redis.call('SADD', 'openrl:accelerators', string.sub(base, #'openrl:accelerator:' + 1))
redis.call('HSET', base, 'floor', ARGV[5], 'multiple', ARGV[6])
redis.call('HSETNX', base, 'first', whole(now))
for _, other in ipairs(redis.call('ZRANGE', LINE, 0, -1)) do
  if not asks(other) then
    redis.call('ZREM', LINE, other)
    redis.call('HDEL', SEEN, other)
  end
end
local came = redis.call('ZADD', LINE, 'NX', whole(now), owner) == 1
redis.call('HSET', SEEN, owner, whole(now))
if turn[2] then
  if came then
    redis.call('PUBLISH', base, 'wanted')
  end
  return ''
end
local owners, credit = waiting(), credits()
if next_of(owners, credit, quantum(owners)) ~= owner then
  return ''
end
local waited = math.max(0, now - tonumber(redis.call('ZSCORE', LINE, owner)))
-- Above the last token, and above those of a store that lost its data: the clock has passed them.
local token = whole(math.max(tonumber(turn[1] or 0) + 1, now))
redis.call('ZREM', LINE, owner)
redis.call('HDEL', SEEN, owner)
keep(credit, owner, owners)
redis.call('HSET', base, 'token', token, 'owner', owner, 'seat', seat, 'holder', ARGV[4], 'state', 'granted', 'granted', whole(now),
  'busy', 0, 'waited', whole(waited))
redis.call('HINCRBY', base, 'turns', 1)
local row = owner_key(owner)
redis.call('HINCRBY', row, 'turns', 1)
if not came then
  redis.call('HINCRBY', row, 'waits', 1)
  redis.call('HINCRBY', row, 'waited', whole(waited))
  redis.call('HSET', row, 'longest', whole(math.max(waited, tonumber(redis.call('HGET', row, 'longest') or 0))))
end
redis.call('EXPIRE', row, KEPT_OWNER_S)
return token
