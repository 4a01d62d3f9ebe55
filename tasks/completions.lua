-- Return the samples of one clone of a sampling client that have ended since its cursor; those before it leave the line.
-- From the first call on nothing else takes a sample of this sampler out of it.
-- Reads futures; writes the line, the sampler's mark.
-- ARGV: 1 tenant, 2 sampler id, 3 clone, 4 cursor, 5 most to return
-- returns NOTFOUND (sampler) | AHEAD (of any cursor) | {cursor, then request id, state, its result's size or file}
local tenant, sampler_id, done = ARGV[1], ARGV[2], K.sampler_done(ARGV[1], ARGV[2], ARGV[3])
local sampler = K.sampler(tenant, sampler_id)
if redis.call('HEXISTS', sampler, 'record') == 0 then
  return 'NOTFOUND'
elseif tonumber(ARGV[4]) > tonumber(redis.call('GET', K.completions(tenant)) or 0) then
  return 'AHEAD'
end
if redis.call('HEXISTS', sampler, 'polled') == 0 then
  redis.call('HSET', sampler, 'polled', 1)
end
redis.call('ZREMRANGEBYSCORE', done, '-inf', ARGV[4])
local ended = redis.call('ZRANGE', done, 0, tonumber(ARGV[5]) - 1, 'WITHSCORES')
local answer = {#ended > 0 and ended[#ended] or ARGV[4]}
for i = 1, #ended, 2 do
  local future = K.future(tenant, ended[i])
  local size = redis.call('HSTRLEN', future, 'result')
  local file = size > 0 and size < 256 and redis.call('HGET', future, 'result') or ''
  answer[#answer + 1], answer[#answer + 2] = ended[i], redis.call('HGET', future, 'state') or ''
  answer[#answer + 1] = string.sub(file, 1, 1) == '@' and file or string.format('%d', math.max(0, size - 1))
end
return answer
