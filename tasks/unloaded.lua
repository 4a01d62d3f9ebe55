-- Keep the promises of runs that are in nobody's memory any more: freed by their owner, handed back, or their owner died.
-- Reads and writes unloads:<slug>, promises; reads the runs and leases.
-- ARGV: 1 slug, 2 ttl of the results, 3 worker id or '', 4 its generation, then what it asks for and has not in memory
-- returns the number of promises kept
local unloads, freed, kept = K.unloads(ARGV[1]), {}, 0
for i = 5, #ARGV do
  freed[ARGV[i]] = true
end
for _, member in ipairs(redis.call('SMEMBERS', unloads)) do
  local tenant, run_id, request_id = string.match(member, '^(%S+) (%S+) (%S+)$')
  local run = redis.call('HMGET', K.run(tenant, run_id), 'owner', 'generation')
  local mine = freed[member] and run[1] == ARGV[3] and run[2] == ARGV[4]
  if mine or not run[1] or run[1] == '' or not holds(run[1], run[2]) then
    unloaded(tenant, run_id, request_id, ARGV[2])
    redis.call('SREM', unloads, member)
    kept = kept + 1
  end
end
tidy_pool(ARGV[1])
return kept
