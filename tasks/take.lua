-- Give a trainer the executable operations of its runs and of runs that nobody owns, which become its own.
-- Reads ready:<slug>, runs, journals, bodies, leases; writes owner, generation, token of claimed runs.
-- ARGV: 1 slug, 2 worker id, 3 its generation, 4 most runs, 5 most operations of a run, 6 most bytes of bodies,
--       7 most runs to claim
-- returns LOST, or {tenant, run id, token, applied, then seq, header, stowed body of each operation} for each run,
--         oldest first
local slug, worker, generation = ARGV[1], ARGV[2], ARGV[3]
local max_runs, max_ops, room, claims = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
if not holds(worker, generation) then
  return 'LOST'
end

local alive = {}
local function owned_by_another(run)
  local owner, owners = run[1], run[2]
  if owner == '' then
    return false
  end
  local identity = owner .. '/' .. owners
  if alive[identity] == nil then
    alive[identity] = holds(owner, owners)
  end
  return alive[identity]
end

local slices, bytes = {}, 0
for _, member in ipairs(redis.call('ZRANGE', K.ready(slug), 0, -1)) do
  if #slices >= max_runs or bytes >= room then
    break
  end
  local tenant, run_id = string.match(member, '^(%S+) (.+)$')
  local run_key = K.run(tenant, run_id)
  local run = redis.call('HMGET', run_key, 'owner', 'generation', 'token', 'applied')
  local mine, token = run[1] == worker and run[2] == generation, run[3]
  if not mine and claims > 0 and not owned_by_another(run) then
    -- Doubles hold this exactly as long as the epoch is under 2^21.
    token = string.format('%.0f', (redis.call('GET', K.EPOCH) or 0) * 4294967296 + redis.call('INCR', K.TOKENS))
    redis.call('HSET', run_key, 'owner', worker, 'generation', generation, 'token', token)
    mine, claims = true, claims - 1
  end
  if mine then
    local slice = {tenant, run_id, token, run[4]}
    for next = run[4] + 1, run[4] + max_ops do
      local seq = string.format('%d', next)
      local header = redis.call('HGET', K.journal(tenant, run_id), seq)
      local size = header and tonumber(cjson.decode(header).size)
      if not header or (#slice > 4 and bytes + size > room) then
        break
      end
      bytes = bytes + size
      slice[#slice + 1], slice[#slice + 2] = seq, header
      slice[#slice + 1] = redis.call('HGET', K.bodies(tenant, run_id), seq) or ''
    end
    slices[#slices + 1] = slice
  end
end
return slices
