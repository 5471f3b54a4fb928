// baton_kv_layout, defined: a layout and where its buffers lie.
#pragma once

#include "kvtransfer/agent_kv.h"

struct baton_kv_layout {
  baton::kvtransfer::KvPlacement cache;
};
