-- Apply one decision about this machine's workers. Each action stands alone and changes nothing that another
-- decider has changed meanwhile, so two of them at once do no harm: neither a workload that isn't the one seen, nor a
-- seat at an accelerator whose seats aren't those seen.
-- ARGV[1]  hash: workload name -> its canonical JSON
-- ARGV[2]  hash: claim -> how often its seats have changed
-- ARGV     then sixes: name, JSON of the one seen or '' (none), JSON of the one wanted or '' (none), the claim whose seat
--          it leaves or '', the claim where it takes one or '', that claim's count when it was seen
-- returns  the names that were changed
local workloads, seats, changed, begun = ARGV[1], ARGV[2], {}, {}
for i = 3, #ARGV, 6 do
  local name, seen, wanted, left, taken, count = unpack(ARGV, i, i + 5)
  if taken ~= '' and not begun[taken] then
    begun[taken] = redis.call('HGET', seats, taken) or '0'
  end
  if (redis.call('HGET', workloads, name) or '') == seen and (taken == '' or begun[taken] == count) then
    if wanted == '' then
      redis.call('HDEL', workloads, name)
    else
      redis.call('HSET', workloads, name, wanted)
    end
    for _, claim in ipairs({left, taken}) do
      if claim ~= '' then
        redis.call('HINCRBY', seats, claim, 1)
      end
    end
    changed[#changed + 1] = name
  end
end
return changed
