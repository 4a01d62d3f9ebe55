-- Accept one sampling request, once. `seq` is decimal text throughout: it passes 2^53.
-- Reads and writes: the sampler and its ops, the job, its promise, waiting, turns:<slug>, unfinished:<slug>, depth, pools,
-- queued.
-- ARGV: 1 tenant, 2 sampler id, 3 seq, 4 digest, 5 stowed body, 6 request id, 7 session id, 8 size of the body,
--       9 most bytes queued of a tenant, 10 tokens of its prompt, 11 a list or '', 12 what is laid there along with it
-- returns NEW | SAME | KEYREUSED | NOTFOUND (sampler) | FULL (over the tenant's bytes; nothing was changed)
--         | QUOTA name most use more (nothing was changed)
local tenant, sampler_id, seq, digest, body, request_id = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local record = redis.call('HGET', K.sampler(tenant, sampler_id), 'record')
if not record then
  return 'NOTFOUND'
end
local known = redis.call('HGET', K.sampler_ops(tenant, sampler_id), seq)
if known then
  if known ~= digest then
    return 'KEYREUSED'
  end
  local again = string.sub(body, 1, 1) == '@' and redis.call('HGET', K.job(tenant, request_id), 'body') == body
  return again and 'NEW' or 'SAME'
end
if too_much(tenant, ARGV[8], ARGV[9]) then
  return 'FULL'
end

local now, most = clock(), quota(tenant, 'operations')
if most > 0 and has(tenant, 'unfinished') >= most then
  return over('operations', most, has(tenant, 'unfinished'))
end
local left, tokens = tokens_left(tenant, now)
if left and left <= 0 then
  return over('tokens_per_minute', tokens, tokens - left, ARGV[10])
end
use_tokens(tenant, tonumber(ARGV[10]), now)

local known_as = cjson.decode(record)
local slug, run_id = known_as.slug, (known_as.run_id or '') ~= '' and known_as.run_id or '-'
redis.call('HSET', K.sampler_ops(tenant, sampler_id), seq, digest)
redis.call('HSET', K.sampler(tenant, sampler_id), 'last_used', now)
redis.call('HSET', K.job(tenant, request_id), 'schema', SCHEMA.sample, 'body', body, 'size', ARGV[8], 'submitted', now,
  'of', slug .. ' ' .. ARGV[7] .. ' ' .. run_id, 'version', known_as.adapter_dir or '')
redis.call('HSET', K.future(tenant, request_id), 'schema', SCHEMA.future, 'state', 'pending', 'kind', 'sample',
  'model_id', '', 'submitted', now)
redis.call('ZADD', K.waiting(tenant, slug), now, request_id)
redis.call('ZADD', K.turns(slug), 'NX', redis.call('HGET', K.served(slug), tenant) or 0, tenant)
redis.call('ZADD', K.unfinished(slug), now, tenant .. ' ' .. request_id)
count('sample', slug, tenant, 1)
note_pool(slug, string.match(known_as.adapter_dir or '', '^tenants/([^/]+)/') or tenant, run_id)
weigh(tenant, tonumber(ARGV[8]))
if redis.call('HEXISTS', K.session(tenant, ARGV[7]), 'record') == 1 then
  redis.call('HSET', K.session(tenant, ARGV[7]), 'last_seen', now)
end
if ARGV[11] ~= '' then
  redis.call('LPUSH', ARGV[11], ARGV[12])
end
redis.call('PUBLISH', K.wake('sample ' .. slug), '')
return 'NEW'
