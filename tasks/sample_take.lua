-- Give a sampler waiting requests: one of each tenant in turn, each tenant's oldest first, and so many of each at most.
-- What a sampler without a lease holds goes back first. A request that two dead ones held is handed out when nothing
-- else is in this process's hands, and nothing beside it: only the guilty one then kills a third. The same call number
-- again gets the same answer, since the first answer may have been lost on its way.
-- Reads and writes: turns, served, waiting, claimants of the slug; inflight of this process; reads leases, jobs.
-- ARGV: 1 slug, 2 worker id, 3 its generation, 4 most requests, 5 call number,
--       6 ttl of the result of one that is given up, 7 most of one tenant in this process's hands; empty: any
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
    while tenant and (count[tenant] or 0) >= most_of_tenant do
      skipped = skipped + 1
      tenant = redis.call('ZRANGE', K.turns(slug), skipped, skipped)[1]
    end
    if not tenant then
      break
    end
    count[tenant] = (count[tenant] or 0) + 1
    local waiting = K.waiting(tenant, slug)
    local request_id = redis.call('ZRANGE', waiting, 0, 0)[1]
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
