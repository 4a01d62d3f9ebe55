-- Apply one decision about local processes. Each action stands alone and changes nothing that another
-- decider has changed meanwhile, so two of them at once do no harm.
-- ARGV[1]  hash: workload name -> its canonical JSON
-- ARGV     then triples: name, JSON of the one seen or '' (none), JSON of the one wanted or '' (none)
-- returns  the names that were changed
local workloads, changed = ARGV[1], {}
for i = 2, #ARGV, 3 do
  local name, seen, wanted = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if (redis.call('HGET', workloads, name) or '') == seen then
    if wanted == '' then
      redis.call('HDEL', workloads, name)
    else
      redis.call('HSET', workloads, name, wanted)
    end
    changed[#changed + 1] = name
  end
end
return changed
