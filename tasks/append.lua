-- Accept one operation of a run, once.
-- Reads and writes: the run, its journal and bodies, its promise, ready:<slug>, gaps, depth, pools, queued, the session's
-- last_seen; for a create the lists of runs, made-on; for an ephemeral save its sampler's
-- reservation.
-- ARGV: 1 tenant, 2 run id, 3 seq, 4 kind, 5 digest, 6 stowed body, 7 its size, 8 request id,
--       9 its tokens, 10 most bytes queued of a tenant, 11 how far ahead of the run's position is too far,
--       12 mode: submit | create | refuse, 13 sampler id to reserve or '', 14 session id,
--       15 submit: a list or '', 16 submit: what is laid there along with it,
--       15 create: slug, 16 create: record, 17 refuse: error, 18 refuse: '1' if it voids gradients, 19 refuse: ttl,
--       17 create: a run's session is silent after
-- returns NEW | SAME | KEYREUSED | MISSING (the gap was closed) | SAMPLER (its number is used) | NOTFOUND (run)
--         | SESSION (not found) | GONE (session) | AHEAD (too far) | FULL (over the tenant's bytes)
--         | QUOTA name most use more
local tenant, run_id, seq, kind, digest, body = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local request_id, mode, reserve, session_id = ARGV[8], ARGV[12], ARGV[13], ARGV[14]
local run, session, now = K.run(tenant, run_id), K.session(tenant, session_id), clock()

local known = redis.call('HMGET', run, 'applied', 'slug')
local applied, slug = known[1], known[2]
if not applied and mode ~= 'create' then
  return 'NOTFOUND'
end

local header = redis.call('HGET', K.journal(tenant, run_id), seq)
if header then
  header = cjson.decode(header)
  if header.kind == 'missing' then
    return 'MISSING'
  elseif header.digest ~= digest then
    return 'KEYREUSED'
  end
  -- The same file name: this very call, sent again by the client library.
  local again = string.sub(body, 1, 1) == '@' and redis.call('HGET', K.bodies(tenant, run_id), seq) == body
  return again and 'NEW' or 'SAME'
end

local ahead = tonumber(seq) - (applied or -1)
-- The SDK sends the first chunk of a call when all others are taken: what stands before a gap may be a GiB more.
local before_gap = ahead > 1
  and redis.call('HEXISTS', K.journal(tenant, run_id), string.format('%d', applied + 1)) == 0
if ahead > tonumber(ARGV[11]) then
  return 'AHEAD'
elseif mode ~= 'refuse' and ahead > 1
  and too_much(tenant, ARGV[7], tonumber(ARGV[10]) + (before_gap and 1073741824 or 0)) then
  return 'FULL'
end
if mode == 'submit' then
  -- What the run can execute next is always taken; so is what stands before a gap, since waiting would not close it.
  local most = ahead > 1 and not before_gap and quota(tenant, 'operations') or 0
  if most > 0 and has(tenant, 'unfinished') >= most then
    return over('operations', most, has(tenant, 'unfinished'))
  end
  local refused = string.sub(kind, 1, 5) == 'save_' and over_bytes(tenant, 1)
  if refused then
    return refused
  end
end
if not applied then
  if redis.call('HEXISTS', session, 'record') == 0 then
    return 'SESSION'
  elseif redis.call('HEXISTS', session, 'finished') == 1 then
    return 'GONE'
  end
  local most = quota(tenant, 'runs')
  local live = most > 0 and live_runs(tenant, now, ARGV[17], most) or 0
  if most > 0 and live >= most then
    return over('runs', most, live)
  end
end
if reserve ~= '' then
  local sampler = K.sampler(tenant, reserve)
  if redis.call('HEXISTS', sampler, 'record') == 1 or redis.call('HSETNX', sampler, 'reserved', request_id) == 0 then
    return 'SAMPLER'
  end
end

if not applied then
  slug = ARGV[15]
  redis.call('HSET', run, 'record', ARGV[16], 'slug', slug, 'session', session_id, 'created', now, 'applied', -1,
    'pending', 0, 'state', 'creating', 'owner', '', 'generation', '', 'token', '')
  local record = cjson.decode(ARGV[16])
  if (record.base_digest or '') ~= '' then
    redis.call('HSETNX', K.MADE_ON, record.base_model, record.base_digest)
  end
  redis.call('ZADD', K.runs(tenant), now, run_id)
  redis.call('HSET', K.session_runs(tenant, session_id), run_id, now)
end
redis.call('HSET', run, 'last_request', now)
if redis.call('HEXISTS', session, 'record') == 1 then
  redis.call('HSET', session, 'last_seen', now)
end
redis.call('HSET', K.future(tenant, request_id), 'schema', SCHEMA.future, 'state', 'pending', 'kind', kind,
  'model_id', run_id, 'submitted', now)
if mode == 'refuse' then
  enter(tenant, run_id, slug, seq, {kind = 'refused', digest = digest, submitted = now, size = '0',
    outcome = ARGV[17], voids = ARGV[18]})
  finish(tenant, request_id,
    {state = 'failed', content_type = '', result = '', error = ARGV[17], category = 'user'}, now, ARGV[19])
else
  header = {kind = kind, digest = digest, submitted = now, size = ARGV[7], tokens = ARGV[9]}
  enter(tenant, run_id, slug, seq, header)
  redis.call('HSET', K.bodies(tenant, run_id), seq, body)
end
place(tenant, run_id, now)
if mode == 'submit' and ARGV[15] ~= '' then
  redis.call('LPUSH', ARGV[15], ARGV[16])
end
-- The owner hears of it here, at once; the doorbell shows the operation, and finds a worker for a run without an owner.
-- What is next in its run, alone there and short comes along, as `take` would bring it: what that would keep back doesn't.
local owned = redis.call('HMGET', run, 'owner', 'token', 'suspect', 'cancels')
local function told()
  if mode ~= 'submit' or ahead ~= 1 or #body > TOLD_BODY or string.sub(body, 1, 1) ~= '=' or owned[3] == seq or owned[4]
    or redis.call('HEXISTS', K.journal(tenant, run_id), string.format('%d', seq + 1)) == 1 then
    return ''
  end
  local left = tonumber(ARGV[9]) > 0 and tokens_left(tenant, now)
  if left and left <= 0 then
    return ''
  end
  local parts, lengths = {tenant, run_id, owned[2], applied, '0', seq, cjson.encode(header), body}, {}
  for i, part in ipairs(parts) do
    lengths[i] = #part
  end
  return table.concat(lengths, ' ') .. '\n' .. table.concat(parts)
end
if owned[1] and owned[1] ~= '' then
  redis.call('PUBLISH', K.wake(owned[1]), told())
end
return 'NEW'
