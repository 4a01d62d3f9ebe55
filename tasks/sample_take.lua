-- Give a sampler waiting requests: one of each tenant in turn, each tenant's oldest first, and so many of each at most.
-- What a sampler without a lease holds goes back first. A request that two dead ones held is handed out when nothing
-- else is in this process's hands, and nothing beside it: only the guilty one then kills a third. The same call number
-- again gets the same answer, since the first answer may have been lost on its way.
-- A sampler that keeps one version of the weights in memory leaves a request to one that has the request's version, while
-- that one has room for it: if it draws from something else itself, or if that one is idle. After a while it takes it.
-- Reads and writes: turns, served, waiting, claimants of the slug; inflight of this process, its lease; reads leases, jobs.
-- ARGV: 1 slug, 2 worker id, 3 its generation, 4 most requests, 5 call number,
--       6 ttl of the result of one that is given up, 7 most of one tenant in this process's hands; empty: any,
--       8 the version that it has in memory, '-' for none; '' where it keeps many, 9 seconds that it leaves a request
-- returns LOST, or {tenant, request id, submitted, stowed body, schema} for each request
local slug, worker, generation, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if not holds(worker, generation) then
  return 'LOST'
end
local identity = worker .. '/' .. generation
for _, other in ipairs(redis.call('SMEMBERS', K.claimants(slug))) do
  if other ~= identity and not holds(string.match(other, '^(.*)/([^/]*)$')) then
    give_back(slug, other, ARGV[6])
  end
end

local MOST_LOOKED_AT = 1024
local look = 0 -- of a tenant's oldest, at so many: no more are left than others have room for
local room, idle = {}, {} -- by version, of the other samplers that have it
if (ARGV[8] or '') ~= '' then
  redis.call('HSET', K.worker(worker), 'version', ARGV[8], 'room', ARGV[7])
  for _, other in ipairs(redis.call('SMEMBERS', K.claimants(slug))) do
    local has = redis.call('HMGET', K.worker(string.match(other, '^(.*)/[^/]*$')), 'version', 'room', 'state')
    if other ~= identity and has[1] and has[1] ~= ARGV[8] and has[3] ~= 'stopping' then
      local in_hand = redis.call('HLEN', K.inflight(other))
      local left = math.max(0, (tonumber(has[2]) or math.huge) - in_hand)
      room[has[1]] = (room[has[1]] or 0) + left
      look = look + left
      idle[has[1]] = idle[has[1]] or in_hand == 0
    end
  end
end

look = math.min(look, MOST_LOOKED_AT)
local now, is_left = tonumber(clock()), {}
local function leaves(tenant, request_id, submitted, in_hand)
  local member = tenant .. ' ' .. request_id
  if is_left[member] or now - submitted >= (tonumber(ARGV[9]) or 0) then
    return is_left[member]
  end
  local version = redis.call('HGET', K.job(tenant, request_id), 'version')
  if version and (room[version] or 0) > 0 and (in_hand > 0 or idle[version]) then
    room[version] = room[version] - 1
    is_left[member] = true
  end
  return is_left[member]
end

local function oldest(tenant, in_hand)
  local waiting = K.waiting(tenant, slug)
  if not next(room) then
    return redis.call('ZRANGE', waiting, 0, 0)[1]
  end
  local found = redis.call('ZRANGE', waiting, 0, look, 'WITHSCORES')
  for i = 1, #found, 2 do
    if not leaves(tenant, found[i], tonumber(found[i + 1]), in_hand) then
      return found[i]
    end
  end
end

local function suspect(tenant, request_id)
  return tonumber(redis.call('HGET', K.job(tenant, request_id), 'crashes') or 0) >= 2
end

local inflight, call = K.inflight(identity), K.inflight(identity) .. ':call'
local last, members = redis.call('GET', call), {}
last = last and cjson.decode(last)
if last and last.number == ARGV[5] then
  members = last.members
else
  local held = redis.call('HKEYS', inflight)
  local alone = #held == 1 and suspect(string.match(held[1], '^(%S+) (.+)$'))
  local most_of_tenant = tonumber(ARGV[7]) or math.huge
  local count, skipped = {}, 0
  for _, member in ipairs(held) do
    local tenant = string.match(member, '^%S+')
    count[tenant] = (count[tenant] or 0) + 1
  end
  while #members < limit and not alone do
    local tenant = redis.call('ZRANGE', K.turns(slug), skipped, skipped)[1]
    local request_id
    while tenant do
      request_id = (count[tenant] or 0) < most_of_tenant and oldest(tenant, #held + #members)
      if request_id then
        break
      end
      skipped = skipped + 1
      tenant = redis.call('ZRANGE', K.turns(slug), skipped, skipped)[1]
    end
    if not tenant then
      break
    end
    count[tenant] = (count[tenant] or 0) + 1
    local waiting = K.waiting(tenant, slug)
    alone = suspect(tenant, request_id)
    if alone and #held + #members > 0 then
      break
    end
    redis.call('ZREM', waiting, request_id)
    local turn = redis.call('HINCRBY', K.served(slug), ' ', 1)
    redis.call('HSET', K.served(slug), tenant, turn)
    if redis.call('EXISTS', waiting) == 1 then
      redis.call('ZADD', K.turns(slug), turn, tenant)
    else
      redis.call('ZREM', K.turns(slug), tenant)
    end
    members[#members + 1] = tenant .. ' ' .. request_id
    redis.call('HSET', inflight, members[#members], redis.call('HGET', K.job(tenant, request_id), 'submitted'))
  end
  redis.call('SADD', K.claimants(slug), identity)
  if #members > 0 then
    redis.call('SET', call, cjson.encode({number = ARGV[5], members = members}))
  end
end

local jobs = {}
for _, member in ipairs(members) do
  local submitted = redis.call('HGET', inflight, member)
  if submitted then
    local tenant, request_id = string.match(member, '^(%S+) (.+)$')
    local job = redis.call('HMGET', K.job(tenant, request_id), 'body', 'schema')
    jobs[#jobs + 1] = {tenant, request_id, submitted, job[1], job[2]}
  end
end
return jobs
