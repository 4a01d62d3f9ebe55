-- Note that results were given to their clients; from the first time on each is kept for a shorter while.
-- A sample leaves the line of those whose client asks for several at once, unless this client does.
-- ARGV: 1 how long they are kept now, then tenant, request id of each.  returns how many it was the first time for
local function deliver(tenant, request_id)
  local future = K.future(tenant, request_id)
  local known = redis.call('HMGET', future, 'state', 'result')
  if not known[1] or known[1] == 'pending' or redis.call('HSETNX', future, 'delivered', clock()) == 0 then
    return 0
  end
  local sampler_id, _, clone = sample_parts(request_id)
  if sampler_id and redis.call('HEXISTS', K.sampler(tenant, sampler_id), 'polled') == 0 then
    redis.call('ZREM', K.sampler_done(tenant, sampler_id, clone), request_id)
  end
  redis.call('PEXPIRE', future, math.floor(ARGV[1] * 1000))
  if known[2] and string.sub(known[2], 1, 1) == '@' then
    keep_file(known[2], clock() + ARGV[1])
  end
  return 1
end

local first = 0
for i = 2, #ARGV, 2 do
  first = first + deliver(ARGV[i], ARGV[i + 1])
end
return first
