-- Note that a session lives, or that it has ended.
-- ARGV: 1 tenant, 2 session id, 3 the reason of its end or ''
-- returns OK | NOTFOUND | GONE (it has ended before)
local session = K.session(ARGV[1], ARGV[2])
if redis.call('HEXISTS', session, 'record') == 0 then
  return 'NOTFOUND'
elseif redis.call('HEXISTS', session, 'finished') == 1 then
  return 'GONE'
end
redis.call('HSET', session, 'last_seen', clock())
if ARGV[3] ~= '' then
  redis.call('HSET', session, 'finished', clock(), 'reason', ARGV[3])
end
return 'OK'
