-- Note that directories are gone whose rows had gone before; a full run's versions are counted until here.
-- Reads and writes dropped, held, the accounts.  ARGV: the directories
for _, directory in ipairs(ARGV) do
  redis.call('ZREM', K.DROPPED, directory)
  local tenant = string.match(directory, '^tenants/([^/]+)/')
  local held = tenant and redis.call('HGET', K.held(tenant), directory)
  if held then
    redis.call('HDEL', K.held(tenant), directory)
    add(tenant, 'stored', -tonumber(string.match(held, '^%d+')))
  end
end
return 'OK'
