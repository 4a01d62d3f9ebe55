-- Apply one decision about local processes. Each action stands alone and changes nothing that another
-- decider has changed meanwhile, so two of them at once do no harm.
-- ARGV[1]  hash: workload name -> its canonical JSON
-- ARGV     then triples: 'start' | 'stop', name, JSON (of the new workload, or of the one seen)
-- returns  the names that were changed
local workloads, changed = ARGV[1], {}
for i = 2, #ARGV, 3 do
  local verb, name, seen = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if verb == 'start' then
    if redis.call('HSETNX', workloads, name, seen) == 1 then
      changed[#changed + 1] = name
    end
  elseif redis.call('HGET', workloads, name) == seen then
    redis.call('HDEL', workloads, name)
    changed[#changed + 1] = name
  end
end
return changed
