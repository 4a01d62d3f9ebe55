-- Register a sampler under its number in the session, once.
-- ARGV: 1 tenant, 2 session id, 3 sampler id, 4 record, 5 digest of what the client asked for, 6 created
-- returns NEW | SAME | KEYREUSED | NOTFOUND (session) | GONE (session)
local tenant, session_id, sampler_id, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
local sampler, session = K.sampler(tenant, sampler_id), K.session(tenant, session_id)
local known = redis.call('HMGET', sampler, 'digest', 'record', 'reserved')
if known[1] == digest then
  return 'SAME'
elseif known[1] or known[2] or known[3] then
  return 'KEYREUSED'
elseif redis.call('HEXISTS', session, 'record') == 0 then
  return 'NOTFOUND'
elseif redis.call('HEXISTS', session, 'finished') == 1 then
  return 'GONE'
end
redis.call('HSET', sampler, 'record', ARGV[4], 'digest', digest, 'last_used', clock())
redis.call('HSET', K.session_samplers(tenant, session_id), sampler_id, ARGV[6])
redis.call('HSET', session, 'last_seen', clock())
return 'NEW'
