-- Tell which files a run still needs.
-- Reads the run, its journal and bodies, its checkpoints.  ARGV: 1 tenant, 2 run id
-- returns {directory of the recovery snapshot or '', that of the version that was published last or '', stowed bodies in files, stowed bodies of operations that read a
--          checkpoint, rows of the checkpoints}
local run_key, journal, bodies = K.run(ARGV[1], ARGV[2]), K.journal(ARGV[1], ARGV[2]), K.bodies(ARGV[1], ARGV[2])
local files, loads = {}, {}
for _, seq in ipairs(redis.call('HKEYS', bodies)) do
  local body = redis.call('HGET', bodies, seq)
  if string.sub(body, 1, 1) == '@' then
    files[#files + 1] = body
  end
  local header = redis.call('HGET', journal, seq)
  local kind = header and cjson.decode(header).kind
  if kind == 'create_model' or kind == 'load_weights' then
    loads[#loads + 1] = body
  end
end
return {redis.call('HGET', run_key, 'snapshot_dir') or '', redis.call('HGET', run_key, 'last_version') or '', files, loads,
  redis.call('HVALS', K.checkpoints(ARGV[1], ARGV[2]))}
