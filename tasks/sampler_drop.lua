-- Drop a sampler's weights, unless somebody has used it since it was looked at. Its record stays, to say what it was.
-- ARGV: 1 tenant, 2 sampler id, 3 its last use as it was read or '', 4 directory of its weights.  returns 1, or 0
local sampler = K.sampler(ARGV[1], ARGV[2])
local known = redis.call('HMGET', sampler, 'record', 'last_used')
if not known[1] or (known[2] or '') ~= ARGV[3] then
  return 0
end
local row = cjson.decode(known[1])
if (row.size_bytes or 0) > 0 then  -- else it is a checkpoint's, which counts it
  local run_id = row.run_id and row.run_id ~= '' and row.run_id or '-'
  discount(ARGV[1], row, ARGV[4], row.slug .. ' ' .. row.session_id .. ' ' .. run_id)
end
redis.call('HSET', sampler, 'dropped', known[1])
redis.call('HDEL', sampler, 'record')
redis.call('ZADD', K.DROPPED, clock(), ARGV[4])
return 1
