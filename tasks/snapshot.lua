-- Register a recovery snapshot, if the worker's token is still the run's, and drop the bodies that it covers.
-- Headers and digests stay. Files of dropped bodies are the caller's to delete.
-- ARGV: 1 tenant, 2 run id, 3 token, 4 directory, 5 position that the snapshot holds
-- returns {OK, stowed bodies in files...} | {STALE}
local tenant, run_id, position = ARGV[1], ARGV[2], tonumber(ARGV[5])
local run = redis.call('HMGET', K.run(tenant, run_id), 'token', 'applied', 'snapshot', 'trimmed')
if not run[1] or run[1] ~= ARGV[3] or position > tonumber(run[2]) or position < tonumber(run[3] or -1) then
  return {'STALE'}
end
redis.call('HSET', K.run(tenant, run_id), 'snapshot', ARGV[5], 'snapshot_dir', ARGV[4], 'trimmed', ARGV[5])
local answer = {'OK'}
for each = tonumber(run[4] or -1) + 1, position do
  local seq = string.format('%d', each)
  local body = redis.call('HGET', K.bodies(tenant, run_id), seq)
  if body and string.sub(body, 1, 1) == '@' then
    answer[#answer + 1] = body
  end
  redis.call('HDEL', K.bodies(tenant, run_id), seq)
end
return answer
