-- Record how an operation ended and move its run on, if the worker's token is still the run's.
-- Reads and writes: the run, its journal, its promise, ready:<slug>, gaps, depth, queued, files; the rows given.
-- ARGV: 1 tenant, 2 run id, 3 seq, 4 token, 5 request id, 6 state: done | failed, 7 content type, 8 stowed result,
--       9 error, 10 category, 11 ttl of the result, 12 number of rows, then key, field, value of each row,
--       then name, value of each of the run's fields
-- returns OK | AGAIN (this token had committed it before; nothing was changed) | STALE
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

header.token = token
local fields = 13 + 3 * tonumber(ARGV[12])
if header.kind ~= 'refused' and header.kind ~= 'missing' then
  header.outcome = ARGV[9]
  finish(tenant, request_id,
    {state = ARGV[6], content_type = ARGV[7], result = ARGV[8], error = ARGV[9], category = ARGV[10]}, now, ARGV[11])
  for i = 13, fields - 1, 3 do
    redis.call('HSET', ARGV[i], ARGV[i + 1], ARGV[i + 2])
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
