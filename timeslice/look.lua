-- Say whether the holder of a turn is to go on. Changes nothing.
-- ARGV: 1 base, 2 token, 3 microseconds without work, or '' where work is ready
-- returns 'stale', 'yield', 'keep' (nobody waits), or the microseconds after which to look again
local token, idle = ARGV[2], tonumber(ARGV[3])
if not holds(token) then
  return 'stale'
end
local owners = waiting()
if #owners == 0 then
  return 'keep'
end
local owner, granted = redis.call('HGET', base, 'owner'), field('granted')
if idle then
  -- To wait for as long as a switch costs is at most twice as dear as to know what comes (ski rental).
  local cost = redis.call('HMGET', owner_key(owner), 'park', 'restore')
  local left = (cost[1] or 0) + (cost[2] or 0) - idle
  return left <= 0 and 'yield' or whole(left)
end
local present = {unpack(owners)}
present[#present + 1] = owner
local share = quantum(present)
local left = granted + share - now
if left > 0 then
  return whole(left)
end
local credit = credits()
credit[owner] = (credit[owner] or share) - cost_of(owners, granted)
return next_of(present, credit, share) == owner and whole(share) or 'yield'
