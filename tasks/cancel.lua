-- Cancel operations of a run that wait. What its owner may have in hand is only marked: `take`, which the owner calls
-- with empty hands, cancels what it has not carried out by then.
-- Reads the run, its journal; writes its journal, bodies, promises, queued, files, the run, its cancels.
-- ARGV: 1 tenant, 2 run id, 3 error, 4 ttl of results, then the numbers; none: all that wait
-- returns NOTFOUND (run) | {ENDED | CREATION | ASKED | CANCELLED | MISSING for each number}
local tenant, run_id, error, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local run_key, journal = K.run(tenant, run_id), K.journal(tenant, run_id)
local run = redis.call('HMGET', run_key, 'applied', 'owner', 'pending')
local applied, owner = run[1], run[2]
if not applied then
  return 'NOTFOUND'
end

local seqs, answers = {unpack(ARGV, 5)}, {}
local next, left = applied + 1, #ARGV < 5 and tonumber(run[3]) or 0
while left > 0 and next - applied <= 100001 do  -- MAX_AHEAD, where every number is
  local seq = string.format('%d', next)
  if redis.call('HEXISTS', journal, seq) == 1 then
    seqs[#seqs + 1], left = seq, left - 1
  end
  next = next + 1
end

-- In hand are operations without a hole from the next one on, so none is where that one is missing.
local in_hand = owner ~= '' and redis.call('HEXISTS', journal, string.format('%d', applied + 1)) == 1
local asked = false
for i, seq in ipairs(seqs) do
  local header, known = waits(tenant, run_id, seq, applied), redis.call('HGET', journal, seq)
  if not known then
    answers[i] = 'MISSING'
  elseif not header then
    answers[i] = tonumber(seq) == 0 and tonumber(applied) < 0 and 'CREATION' or 'ENDED'
  elseif in_hand then
    redis.call('HSET', K.cancels(tenant, run_id), seq, cjson.encode({error = error, ttl = ttl}))
    asked, answers[i] = true, 'ASKED'
  else
    withdraw(tenant, run_id, seq, header, error, ttl)
    answers[i] = 'CANCELLED'
  end
end
if asked then
  redis.call('HSET', run_key, 'cancels', 1)
  redis.call('PUBLISH', K.wake(owner), '')
end
return answers
