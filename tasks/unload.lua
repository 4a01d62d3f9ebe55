-- Ask the owner of a run to let go of its memory; what nobody has in memory is done at once.
-- Request ids of this kind count on from above the numbers of operations.
-- Reads and writes the run, its promise, unloads:<slug>; reads the owner's lease.
-- ARGV: 1 tenant, 2 run id, 3 ttl of the result.  returns the request id, or '' if there is no such run
local tenant, run_id = ARGV[1], ARGV[2]
local run_key = K.run(tenant, run_id)
local run = redis.call('HMGET', run_key, 'slug', 'owner', 'generation')
if not run[1] then
  return ''
end
local number = 2147483647 + redis.call('HINCRBY', run_key, 'unloads', 1)
local request_id, now = string.format('%s:%.0f', run_id, number), clock()
redis.call('HSET', K.future(tenant, request_id), 'schema', SCHEMA.future, 'state', 'pending', 'kind', 'unload_model',
  'model_id', run_id, 'submitted', now)
if run[2] and run[2] ~= '' and holds(run[2], run[3]) then
  redis.call('SADD', K.unloads(run[1]), tenant .. ' ' .. run_id .. ' ' .. request_id)
  note_pool(run[1], tenant, run_id)
  redis.call('PUBLISH', K.wake(run[2]), '')
else
  unloaded(tenant, run_id, request_id, ARGV[3])
end
return request_id
