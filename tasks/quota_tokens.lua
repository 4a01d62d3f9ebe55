-- Say how long a tenant has to wait until it may use tokens again.  ARGV: 1 tenant.  returns milliseconds, 0 if it needn't
local left, most = tokens_left(ARGV[1], clock())
return left and math.ceil(math.max(0, -left) * 60000 / most) or 0
