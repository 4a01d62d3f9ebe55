-- Count what a tenant stores for the time since the last look, hour by hour. Puts its account right by it, unless that
-- has changed since the rows were read: then the next look does.
-- Reads and writes the account; writes usage.
-- ARGV: 1 tenant, 2 the longest time that counts, 3 bytes in the account before the rows were read, then of each run:
--       what its usage is counted under (slug, session, run), its bytes
-- returns bytes stored
local tenant, now, total = ARGV[1], clock(), 0
local from = math.max(tonumber(redis.call('HGET', K.account(tenant), 'metered') or now), now - ARGV[2])
redis.call('HSET', K.account(tenant), 'metered', now)
for i = 4, #ARGV, 2 do
  total = total + ARGV[i + 1]
end
while total > 0 and from < tonumber(now) do
  local till = math.min((math.floor(from / 3600) + 1) * 3600, tonumber(now))
  for i = 4, #ARGV, 2 do
    note_usage(tenant, from, ARGV[i], {byte_seconds = ARGV[i + 1] * (till - from)})
  end
  from = till
end
if has(tenant, 'stored') == tonumber(ARGV[3]) then
  add(tenant, 'stored', total - has(tenant, 'stored'))
end
return total
