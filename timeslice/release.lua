-- Give a turn back: the holder's state is off the accelerator. Called again, the same answer.
-- ARGV: 1 base, 2 token, 3 microseconds of use, 4 microseconds that parking took, or '' if nothing was ever restored
-- returns 1, or 0 if the token isn't the present turn's; then nothing is changed
local token = ARGV[2]
if redis.call('HGET', base, 'released') == token then
  return 1
end
if not holds(token) then
  return 0
end
redis.call('HSET', base, 'busy', ARGV[3], 'released', token)
if ARGV[4] ~= '' then
  redis.call('HSET', owner_key(redis.call('HGET', base, 'owner')), 'park', ARGV[4])
end
finish('released')
return 1
