-- Put one row of a run's checkpoint in the place of another, or remove it.
-- ARGV: 1 tenant, 2 run id, 3 checkpoint id, 4 the row as it was read, 5 the new row or '' for none
-- returns OK (also when it was done before) | CHANGED (somebody else wrote it meanwhile; nothing was changed)
local rows = K.checkpoints(ARGV[1], ARGV[2])
local found = redis.call('HGET', rows, ARGV[3]) or ''
if found == ARGV[5] then
  return 'OK'
elseif found ~= ARGV[4] then
  return 'CHANGED'
elseif ARGV[5] == '' then
  redis.call('HDEL', rows, ARGV[3])
else
  redis.call('HSET', rows, ARGV[3], ARGV[5])
end
return 'OK'
