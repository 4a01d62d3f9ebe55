-- Write down how a turn goes.
-- ARGV: 1 base, 2 token, then name, value: state, holder, busy, park, restore
-- returns 1, or 0 if the token isn't the present turn's; then nothing is changed
if not holds(ARGV[2]) then
  return 0
end
local row = owner_key(redis.call('HGET', base, 'owner'))
for i = 3, #ARGV, 2 do
  local of_owner = ARGV[i] == 'park' or ARGV[i] == 'restore'
  redis.call('HSET', of_owner and row or base, ARGV[i], ARGV[i + 1])
end
redis.call('EXPIRE', row, KEPT_OWNER_S)
if ARGV[3] == 'state' then
  redis.call('PUBLISH', base, 'state')
end
redis.call('HSET', base, 'heard', whole(now))
return 1
