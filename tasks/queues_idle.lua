-- Forget the queues of a full run's pool that has nothing to do and no worker.
-- Reads pools, workers and their leases; writes rung, queues.  ARGV: 1 family, 2 slug
-- returns the tenants that had a queue, or false: the pool is still of use
local family, slug = ARGV[1], ARGV[2]
local base = base_of(slug)
if base and redis.call('HEXISTS', K.pools(base), slug) == 1 then
  return false
end
for _, worker in ipairs(redis.call('SMEMBERS', K.WORKERS)) do
  if redis.call('HGET', K.worker(worker), 'slug') == slug then
    return false
  end
end
local tenants = redis.call('SMEMBERS', K.queues(family, slug))
redis.call('DEL', K.queues(family, slug))
redis.call('SREM', K.RUNG, family .. ' ' .. slug)
return tenants
