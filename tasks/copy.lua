-- Register the copy of a checkpoint, once: a run that holds nothing else and can't be trained on, in a session that is
-- there or in one that is opened for it, already finished.
-- Reads and writes the session, the run, its journal and checkpoints; lists of sessions and runs; the idempotency key.
-- ARGV: 1 tenant, 2 session id, 3 record of the session to open, or '' if it is there, 4 run id, 5 slug, 6 the run's
--       record, 7 checkpoint id, 8 the checkpoint's row, or '' to look for an earlier copy alone, 9 address of the
--       copy, 10 digest of what was asked for, 11 digest of the idempotency key or '', 12 how long the key counts
-- returns {NEW | SAME, address, directory} | {NONE} (there is no earlier one) | {KEYREUSED}
--         | {NOTFOUND} (session) | {GONE} (session) | {QUOTA name most use more}
local tenant, session_id, run_id, row, digest = ARGV[1], ARGV[2], ARGV[4], ARGV[8], ARGV[10]
local key, session, journal = K.idempotency(tenant, ARGV[11]), K.session(tenant, session_id), K.journal(tenant, run_id)

local earlier = ARGV[11] ~= '' and redis.call('GET', key) or redis.call('HGET', journal, '0')
if earlier then
  earlier = cjson.decode(earlier)
  return earlier.digest == digest and {'SAME', earlier.path, earlier.directory} or {'KEYREUSED'}
elseif row == '' then
  return {'NONE'}
end
local refused = over_bytes(tenant, cjson.decode(row).size_bytes or 0)
if refused then
  return {refused}
elseif ARGV[3] ~= '' then
  redis.call('HSET', session, 'record', ARGV[3], 'last_seen', clock(), 'finished', clock(),
    'reason', '{"type":"success","detail":"copy_weights"}')
  redis.call('ZADD', K.sessions(tenant), clock(), session_id)
  redis.call('SADD', K.TENANTS, tenant)
elseif redis.call('HEXISTS', session, 'record') == 0 then
  return {'NOTFOUND'}
elseif redis.call('HEXISTS', session, 'finished') == 1 then
  return {'GONE'}
end

local now, directory = clock(), cjson.decode(row).directory
-- Entry 0 keeps the number from being used for a run that is trained.
local header = cjson.encode({schema = SCHEMA.entry, kind = 'copy', digest = digest, submitted = now, size = '0',
  outcome = '', path = ARGV[9], directory = directory})
redis.call('HSET', journal, '0', header)
redis.call('HSET', K.run(tenant, run_id), 'record', ARGV[6], 'slug', ARGV[5], 'session', session_id, 'created', now,
  'last_request', now, 'applied', 0, 'pending', 0, 'state', 'copied', 'owner', '', 'generation', '', 'token', '')
redis.call('ZADD', K.runs(tenant), now, run_id)
redis.call('HSET', K.session_runs(tenant, session_id), run_id, now)
put_checkpoint(tenant, run_id, ARGV[7], row)
redis.call('ZREM', K.DROPPED, directory)
if ARGV[11] ~= '' then
  redis.call('SET', key, header, 'EX', ARGV[12])
end
return {'NEW', ARGV[9], directory}
