-- Note that files of the spool are deleted.  ARGV: the files as the store has them.  returns how many were known
local swept = 0
for _, file in ipairs(ARGV) do
  if redis.call('ZREM', K.FILES, file) == 1 then
    local tenant, size = string.match(file, '^@spool/([^/]+)/.*%-(%d+)$')
    if tenant then
      add(tenant, 'spooled', -tonumber(size))
    end
    swept = swept + 1
  end
end
return swept
