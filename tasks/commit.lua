-- Record how an operation ended and move its run on, if the worker's token is still the run's.
-- Reads and writes: the run, its journal, its promise, ready:<slug>, gaps, depth, queued, files; the rows given;
-- dropped, published for those of checkpoints.
-- ARGV: 1 tenant, 2 run id, 3 seq, 4 token, 5 request id, 6 state: done | failed, 7 content type, 8 stowed result,
--       9 error, 10 category, 11 ttl of the result, 12 microseconds that it took, 13 number of rows,
--       then key, field, value of each row, then name, value of each of the run's fields
-- returns OK | AGAIN (this token had committed it before; nothing was changed) | STALE
--         | QUOTA name most use more (its rows hold more than the tenant may store; nothing was changed)
local tenant, run_id, seq, token, request_id = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local run_key, journal, now = K.run(tenant, run_id), K.journal(tenant, run_id), clock()
local run = redis.call('HMGET', run_key, 'token', 'applied', 'slug')
if not run[1] or run[1] ~= token then
  return 'STALE'
end
local header = redis.call('HGET', journal, ARGV[3])
header = header and cjson.decode(header)
if header and seq <= tonumber(run[2]) and header.token == token then
  return redis.call('HGET', K.future(tenant, request_id), 'result') == ARGV[8] and 'OK' or 'AGAIN'
end
if not header or seq ~= run[2] + 1 then
  return 'STALE'
end

-- What the rows add to the tenant's bytes, and how many checkpoints they are.
local fields, growth, checkpoints = 14 + 3 * tonumber(ARGV[13]), 0, 0
for i = 14, fields - 1, 3 do
  local is_checkpoint = ARGV[i] == K.checkpoints(tenant, run_id)
  if is_checkpoint or ARGV[i + 1] == 'record' then
    local old = redis.call('HGET', ARGV[i], ARGV[i + 1])
    old = old and cjson.decode(old) or {}
    local freed = is_checkpoint and is_version(old) and 0 or old.size_bytes or 0
    growth = growth + (cjson.decode(ARGV[i + 2]).size_bytes or 0) - freed
    checkpoints = checkpoints + (is_checkpoint and 1 or 0)
  end
end
local refused = growth > 0 and over_bytes(tenant, growth - header.size)  -- its body goes
if refused then
  return refused
end

header.token, header.finished = token, now
if header.kind ~= 'refused' and header.kind ~= 'missing' then
  header.outcome = ARGV[9]
  finish(tenant, request_id,
    {state = ARGV[6], content_type = ARGV[7], result = ARGV[8], error = ARGV[9], category = ARGV[10]}, now, ARGV[11])
  for i = 14, fields - 1, 3 do
    if ARGV[i] == K.checkpoints(tenant, run_id) then
      put_checkpoint(tenant, run_id, ARGV[i + 1], ARGV[i + 2])
    elseif ARGV[i + 1] == 'record' then
      put_sampler(tenant, ARGV[i], ARGV[i + 2])
      redis.call('PUBLISH', K.wake('versions ' .. run[3]), cjson.decode(ARGV[i + 2]).adapter_dir)
    else
      redis.call('HSET', ARGV[i], ARGV[i + 1], ARGV[i + 2])
    end
  end
  local tokens = tonumber(header.tokens or 0)
  use_tokens(tenant, tokens, now)
  if ARGV[6] == 'done' then
    note_usage(tenant, now, run[3] .. ' ' .. string.match(run_id, '^[^:]+') .. ' ' .. run_id,
      {operations = 1, checkpoints = checkpoints, microseconds = tonumber(ARGV[12]),
        [header.kind == 'forward' and 'forward_tokens' or 'trained_tokens'] = tokens})
  end
  for i = fields, #ARGV, 2 do
    redis.call('HSET', run_key, ARGV[i], ARGV[i + 1])
  end
end
redis.call('HSET', journal, ARGV[3], cjson.encode(header))
redis.call('HSET', run_key, 'applied', ARGV[3])
redis.call('HINCRBY', run_key, 'pending', -1)
count('train', run[3], tenant, -1)
weigh(tenant, -tonumber(header.size))
place(tenant, run_id, now)
return 'OK'
