-- Cancel samples of a tenant that aren't finished, in whoever's hands they are. The sampler that holds one is told.
-- Reads samplers and their ops; writes waiting, turns, inflight, and what ends a sample.
-- ARGV: 1 tenant, 2 error, 3 ttl of results, then request ids
-- returns for each request: NOTFOUND | ENDED | CANCELLED, and the stowed body or ''
local tenant, answers = ARGV[1], {}

-- Take a sample out of the hands of whichever sampler process holds it.
local function snatch(slug, request_id)
  for _, identity in ipairs(redis.call('SMEMBERS', K.claimants(slug))) do
    if redis.call('HDEL', K.inflight(identity), tenant .. ' ' .. request_id) == 1 then
      redis.call('PUBLISH', K.wake('cancelled ' .. string.match(identity, '^(.*)/[^/]*$')), '')
      return
    end
  end
end

for i = 4, #ARGV do
  local request_id, body, state = ARGV[i], '', 'CANCELLED'
  local sampler_id, seq = sample_parts(request_id)
  local records = redis.call('HMGET', K.sampler(tenant, sampler_id), 'record', 'dropped')
  local record = records[1] or records[2]
  if not record or redis.call('HEXISTS', K.sampler_ops(tenant, sampler_id), seq) == 0 then
    state = 'NOTFOUND'
  elseif redis.call('EXISTS', K.job(tenant, request_id)) == 0 then
    state = 'ENDED'
  else
    local slug = cjson.decode(record).slug
    local waiting = K.waiting(tenant, slug)
    if redis.call('ZREM', waiting, request_id) == 0 then
      snatch(slug, request_id)
    elseif redis.call('EXISTS', waiting) == 0 then
      redis.call('ZREM', K.turns(slug), tenant)
    end
    body = finish_sample(slug, tenant, request_id,
      {state = 'failed', content_type = '', result = '', error = ARGV[2], category = 'user'}, ARGV[3])
  end
  answers[#answers + 1], answers[#answers + 2] = state, body
end
return answers
