// What this machine and this process may do: kernel, modules, limits, memory, TCP, NUMA.
#pragma once

#include "bench/doctor/info_root.h"
#include "bench/report/report.h"

namespace baton::bench {

// {"release","modules":{NAME:"loaded"|"available"|"missing"},"ptrace_scope",
//  "dma_buf_registration","virtual"}; virtual: below a hypervisor.
Json kernel_info(const SystemRoot& root);
// {"memlock":{"soft","hard"},"ipc_lock","open_files","cgroup_memory","cgroup_rdma","uverbs"};
// null: no limit.
Json limits_info(const SystemRoot& root);
// {"huge_pages":[{"kib","total","free"}],"transparent","transparent_shmem"}
Json memory_info(const SystemRoot& root);
// {"congestion","available","rmem_max","wmem_max","netdevs":[{"name","state","mtu"}]}
Json network_info(const SystemRoot& root);
// [{"node","cpus","distances"}]
Json numa_info(const SystemRoot& root);
// {"driver","open_module","peermem","gdrdrv"}; driver null where there is none.
Json nvidia_info(const SystemRoot& root);

}  // namespace baton::bench
