-- Give a trainer the executable operations of its runs and of runs that nobody owns, which become its own.
-- One run of each tenant in turn, each tenant's longest waiting first. Headers, and the first few bodies that are here:
-- the others are read for what is chosen.
-- A run whose owner died comes as a suspect: with the number of workers that died with this very operation next.
-- Its first death may be another run's fault, so only those count further that began it (begin.lua).
-- What was to be cancelled is, here: whoever asks has nothing of these runs in hand.
-- Reads ready:<slug>, runs, journals, leases; writes owner, generation, token, suspect, crashes, begun of claimed runs.
-- ARGV: 1 slug, 2 worker id, 3 its generation, 4 most runs, 5 most operations of a run, 6 most runs to claim,
--       7 most bytes of bodies, 8 '1' if its hands may not be empty: runs of which something is to be cancelled wait then
-- returns LOST, or {tenant, run id, token, applied, crashes, then seq, header, stowed body or '' of each operation}
--         for each run
local slug, worker, generation = ARGV[1], ARGV[2], ARGV[3]
local max_runs, max_ops, claims = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local room = tonumber(ARGV[7])
if not holds(worker, generation) then
  return 'LOST'
end

local alive = {}
local function lives(owner, owners)
  local identity = owner .. '/' .. owners
  if alive[identity] == nil then
    alive[identity] = holds(owner, owners)
  end
  return alive[identity]
end

-- Give a run to this worker under a new token; returns the token and the deaths before its next operation.
local function claim(run_key, owner, head, suspect, crashes, begun)
  if owner ~= '' and suspect ~= head then
    suspect, crashes = head, 1
  elseif owner ~= '' and begun == head then
    crashes = crashes + 1
  end
  -- Doubles hold this exactly as long as the epoch is under 2^21.
  local token = string.format('%.0f', (redis.call('GET', K.EPOCH) or 0) * 4294967296 + redis.call('INCR', K.TOKENS))
  redis.call('HSET', run_key, 'owner', worker, 'generation', generation, 'token', token,
    'suspect', suspect, 'crashes', crashes, 'begun', '')
  return token, suspect == head and crashes or 0
end

-- Tell whether a tenant has to wait until it may use tokens again; what uses none needn't.
local now, spent = clock(), {}
local function has_spent(tenant)
  if spent[tenant] == nil then
    local left = tokens_left(tenant, now)
    spent[tenant] = left ~= nil and left <= 0
  end
  return spent[tenant]
end

local function waits_for_tokens(tenant, header)
  return has_spent(tenant) and tonumber(cjson.decode(header).tokens or 0) > 0
end

-- Return an operation's body if it lies here, not in a file, and there is room for it.
local function bring(bodies, seq)
  local size = redis.call('HSTRLEN', bodies, seq)
  local body = 0 < size and size <= room and redis.call('HGET', bodies, seq) or ''
  if string.sub(body, 1, 1) ~= '=' then
    return ''
  end
  room = room - size
  return body
end

local slices = {}
local function offer(tenant, run_id)
  local run_key = K.run(tenant, run_id)
  local run = redis.call('HMGET', run_key, 'owner', 'generation', 'token', 'applied', 'suspect', 'crashes', 'begun',
    'cancels')
  local owner, token, head = run[1], run[3], string.format('%d', run[4] + 1)
  local suspect, crashes = run[5] or '', tonumber(run[6] or 0)
  if run[8] and ARGV[8] == '1' then
    return
  end
  local first = not run[8] and has_spent(tenant) and redis.call('HGET', K.journal(tenant, run_id), head)
  if first and waits_for_tokens(tenant, first) then
    return
  end
  if owner == worker and run[2] == generation then
    crashes = suspect == head and crashes or 0
  elseif claims > 0 and (owner == '' or not lives(owner, run[2])) then
    token, crashes = claim(run_key, owner, head, suspect, crashes, run[7])
    claims = claims - 1
  else
    return
  end
  if run[8] then
    withdraw_all(tenant, run_id, run[4])
  end
  local slice, journal = {tenant, run_id, token, run[4], crashes}, K.journal(tenant, run_id)
  for next = run[4] + 1, run[4] + max_ops do
    local seq = string.format('%d', next)
    local header = redis.call('HGET', journal, seq)
    if not header or waits_for_tokens(tenant, header) then
      break
    end
    slice[#slice + 1], slice[#slice + 2], slice[#slice + 3] = seq, header, bring(K.bodies(tenant, run_id), seq)
  end
  if #slice > 5 then
    slices[#slices + 1] = slice
  end
end

local tenants, runs = {}, {}
for _, member in ipairs(redis.call('ZRANGE', K.ready(slug), 0, -1)) do
  local tenant, run_id = string.match(member, '^(%S+) (.+)$')
  if not runs[tenant] then
    tenants[#tenants + 1], runs[tenant] = tenant, {}
  end
  table.insert(runs[tenant], run_id)
end
local round, left = 1, true
while left and #slices < max_runs do
  left = false
  for _, tenant in ipairs(tenants) do
    local run_id = runs[tenant][round]
    if run_id and #slices < max_runs then
      left = true
      offer(tenant, run_id)
    end
  end
  round = round + 1
end
return slices
