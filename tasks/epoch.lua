-- Begin a new epoch of the store: all tokens minted from now on are above all earlier ones.
-- ARGV: 1 the least it may be.  returns the epoch
local epoch = math.max((redis.call('GET', K.EPOCH) or 0) + 1, tonumber(ARGV[1]))
redis.call('SET', K.EPOCH, string.format('%d', epoch))
return epoch
