-- Give a sampler waiting requests: one of each tenant in turn, each tenant's oldest first.
-- What a sampler without a lease holds goes back first. The same call number again gets the same answer,
-- since the first answer may have been lost on its way.
-- Reads and writes: turns, served, waiting, claimants of the slug; inflight of this process; reads leases, jobs.
-- ARGV: 1 slug, 2 worker id, 3 its generation, 4 most requests, 5 call number
-- returns LOST, or {tenant, request id, submitted, stowed body} for each request
local slug, worker, generation, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if not holds(worker, generation) then
  return 'LOST'
end
local identity = worker .. '/' .. generation
for _, other in ipairs(redis.call('SMEMBERS', K.claimants(slug))) do
  if other ~= identity and not holds(string.match(other, '^(.*)/([^/]*)$')) then
    give_back(slug, other)
  end
end

local inflight, call = K.inflight(identity), K.inflight(identity) .. ':call'
local last, members = redis.call('GET', call), {}
last = last and cjson.decode(last)
if last and last.number == ARGV[5] then
  members = last.members
else
  while #members < limit do
    local tenant = redis.call('ZRANGE', K.turns(slug), 0, 0)[1]
    if not tenant then
      break
    end
    local waiting = K.waiting(tenant, slug)
    local request_id = redis.call('ZRANGE', waiting, 0, 0)[1]
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
    jobs[#jobs + 1] = {tenant, request_id, submitted, redis.call('HGET', K.job(tenant, request_id), 'body')}
  end
end
return jobs
