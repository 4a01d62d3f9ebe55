-- Open a session, once per idempotency key.
-- ARGV: 1 tenant, 2 session id, 3 record, 4 created, 5 digest of the idempotency key or '', 6 how long the key counts
-- returns the session's id: the new one, or the one that this key opened before
local tenant, session_id, key = ARGV[1], ARGV[2], K.idempotency(ARGV[1], ARGV[5])
local earlier = ARGV[5] ~= '' and redis.call('GET', key)
if earlier then
  return earlier
end
redis.call('HSET', K.session(tenant, session_id), 'record', ARGV[3], 'last_seen', clock())
redis.call('ZADD', K.sessions(tenant), ARGV[4], session_id)
redis.call('SADD', K.TENANTS, tenant)
if ARGV[5] ~= '' then
  redis.call('SET', key, session_id, 'EX', ARGV[6])
end
return session_id
