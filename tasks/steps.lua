-- Put before every script, after keys.lua: what several of them do in the same way.

-- Count operations acknowledged and not finished, of one tenant.
local function count(kind, slug, tenant, change)
  if redis.call('HINCRBY', K.depth(kind, slug), tenant, change) <= 0 then
    redis.call('HDEL', K.depth(kind, slug), tenant)
  end
end

-- Count the bytes of bodies accepted and not finished, of one tenant.
local function weigh(tenant, change)
  if change ~= 0 and redis.call('INCRBY', K.queued(tenant), string.format('%d', change)) <= 0 then
    redis.call('DEL', K.queued(tenant))
  end
end

-- Tell whether a body of this size is over what a tenant may have queued. One alone never is.
local function too_much(tenant, size, most)
  local queued = tonumber(redis.call('GET', K.queued(tenant)) or 0)
  return queued > 0 and queued + size > tonumber(most)
end

-- Tell whether the process that took this lease still holds it.
local function holds(worker, generation)
  return generation ~= '' and redis.call('HGET', K.worker(worker), 'generation') == generation
end

-- Put a run where it belongs now: ready with its next operation, or standing before a gap, or neither.
local function place(tenant, run_id, now)
  local run = redis.call('HMGET', K.run(tenant, run_id), 'slug', 'applied', 'pending')
  local slug, member = run[1], tenant .. ' ' .. run_id
  local head = redis.call('HGET', K.journal(tenant, run_id), string.format('%d', run[2] + 1))
  if head then
    redis.call('ZADD', K.ready(slug), cjson.decode(head).submitted, member)
  else
    redis.call('ZREM', K.ready(slug), member)
  end
  if not head and tonumber(run[3]) > 0 then
    redis.call('ZADD', K.GAPS, 'NX', now, member)
  else
    redis.call('ZREM', K.GAPS, member)
  end
end

-- Write the journal's header of one operation and count it.
local function enter(tenant, run_id, slug, seq, header)
  redis.call('HSET', K.journal(tenant, run_id), seq, cjson.encode(header))
  redis.call('HINCRBY', K.run(tenant, run_id), 'pending', 1)
  count('train', slug, tenant, 1)
  weigh(tenant, tonumber(header.size))
end

-- Keep a promise: write how it ended, let it expire, tell who waits.
-- `ending`: {state, content_type, result (stowed), error, category}
local function finish(tenant, request_id, ending, now, ttl_s)
  local future = K.future(tenant, request_id)
  redis.call('HSET', future, 'state', ending.state, 'content_type', ending.content_type, 'result', ending.result,
    'error', ending.error, 'category', ending.category, 'finished', now)
  redis.call('PEXPIRE', future, math.floor(ttl_s * 1000))
  if string.sub(ending.result, 1, 1) == '@' then
    redis.call('ZADD', K.FILES, now + ttl_s, ending.result)
  end
  redis.call('PUBLISH', K.DONE, tenant .. ' ' .. request_id)
end

-- End a sampling request, whoever holds it; `ending` as above. Returns its stowed body.
local function finish_sample(slug, tenant, request_id, ending, ttl_s)
  local job = redis.call('HMGET', K.job(tenant, request_id), 'body', 'size')
  redis.call('DEL', K.job(tenant, request_id))
  redis.call('ZREM', K.unfinished(slug), tenant .. ' ' .. request_id)
  count('sample', slug, tenant, -1)
  weigh(tenant, -(tonumber(job[2]) or 0))
  finish(tenant, request_id, ending, clock(), ttl_s)
  return job[1] or ''
end

-- Give what one sampler process holds back to those who wait, in its old place.
-- With a `ttl_s` that process has died: what has been in the hands of three such ends here.
local function give_back(slug, identity, ttl_s)
  local held = redis.call('HGETALL', K.inflight(identity))
  for i = 1, #held, 2 do
    local tenant, request_id = string.match(held[i], '^(%S+) (.+)$')
    if ttl_s and redis.call('HINCRBY', K.job(tenant, request_id), 'crashes', 1) >= 3 then
      local error = 'the worker died 3 times while running it; it was not tried again'
      local body = finish_sample(slug, tenant, request_id,
        {state = 'failed', content_type = '', result = '', error = error, category = 'server'}, ttl_s)
      if string.sub(body, 1, 1) == '@' then
        redis.call('ZADD', K.FILES, clock(), body)
      end
    else
      redis.call('ZADD', K.waiting(tenant, slug), held[i + 1], request_id)
      redis.call('ZADD', K.turns(slug), 'NX', redis.call('HGET', K.served(slug), tenant) or 0, tenant)
    end
  end
  redis.call('DEL', K.inflight(identity), K.inflight(identity) .. ':call')
  redis.call('SREM', K.claimants(slug), identity)
  return #held / 2
end
