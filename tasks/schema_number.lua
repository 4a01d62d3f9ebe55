-- Say which schema the data in the store has. A store without any data gets today's.
-- ARGV: 1 today's, 2 that of data which says none.  returns the number
local found = redis.call('GET', K.SCHEMA)
if found then
  return found
elseif redis.call('EXISTS', K.EPOCH, K.KEYS, K.TENANTS) > 0 then
  return ARGV[2]
end
redis.call('SET', K.SCHEMA, ARGV[1])
return ARGV[1]
