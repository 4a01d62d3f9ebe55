-- Put one row of a run's checkpoint in the place of another, or remove it.
-- Reads and writes the run's checkpoints; dropped, published.
-- ARGV: 1 tenant, 2 run id, 3 checkpoint id, 4 the row as it was read, 5 the new row or '' for none
-- returns OK (also when it was done before) | CHANGED (somebody else wrote it meanwhile; nothing was changed)
local found = redis.call('HGET', K.checkpoints(ARGV[1], ARGV[2]), ARGV[3]) or ''
if found == ARGV[5] then
  return 'OK'
elseif found ~= ARGV[4] then
  return 'CHANGED'
end
put_checkpoint(ARGV[1], ARGV[2], ARGV[3], ARGV[5])
return 'OK'
