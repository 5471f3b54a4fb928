// Flags that perftest has and we do not, each with the nearest that we have.
#include <algorithm>
#include <array>
#include <string_view>

#include "bench/perftest/perf_options.h"

namespace baton::bench {
namespace {

struct UnsupportedFlag {
  std::string_view flags;  // separated by blanks; a trailing * stands for any rest
  const char* instead;
};

constexpr std::array kUnsupported = {
    UnsupportedFlag{"-A --atomic_type", "there are no atomic tests; the nearest is write_lat"},
    UnsupportedFlag{"--report-histogrm", "use -H, which does the same"},
    UnsupportedFlag{"-g --mcg -M --MGID --connectionless",
                    "there is no multicast; the nearest is send_bw"},
    UnsupportedFlag{"-L --hop_limit", "there is no setting for it; the nearest is --tclass"},
    UnsupportedFlag{"--report-per-port",
                    "the two ports are one row; `baton info` shows the counters of each"},
    UnsupportedFlag{"-X --vector", "the nearest is -e, which sleeps on events"},
    UnsupportedFlag{"--force-link --dlid --pkey_index --flow_label",
                    "there is no setting for it; `baton info --settings` lists those there are"},
    UnsupportedFlag{"--dont_xchg_versions", "both sides must speak the same version"},
    UnsupportedFlag{"--ipv6 --ipv6-addr --raw_ipv6", "write the address itself as HOST: [fe80::1]"},
    UnsupportedFlag{"--bind_source_ip", "the nearest is -d, which chooses the device"},
    UnsupportedFlag{"--recv_post_list", "receives are posted in batches by the provider; see -r"},
    UnsupportedFlag{"--use_old_post_send --no_lock --use_ooo --no_enhanced_reorder --cqe_poll "
                    "--disable_dynamic_polling --use-srq --unsolicited_write --mr_per_qp --log_* "
                    "--congest_type "
                    "--tph_mem --cpu_id --ph",
                    "the provider chooses this by itself; leave it out"},
    UnsupportedFlag{"--send_with_imm", "the nearest is --write_with_imm"},
    UnsupportedFlag{"--odp --use-null-mr --mmap --mmap-offset --payload_file_path",
                    "memory comes from a registered pool; the nearest is --use_hugepages"},
    UnsupportedFlag{
        "--use_cuda_bus_id --cuda_mem_type --use_data_direct --gpu_touch --use_cuda_pcie_mapping",
        "the nearest is --use_cuda=N; `baton info` lists the devices"},
    UnsupportedFlag{"--use_rocm* --use_musa* --use_neuron* --use_hl --use_mlu* --use_opencl "
                    "--opencl_platform_id --use_ib_dm_dmabuf",
                    "there is host memory and CUDA's (--use_cuda=N)"},
    UnsupportedFlag{"--latency_gap --burst_size --typical_pkt_size --rate_limit --rate_limit_type "
                    "--rate_units",
                    "there is no rate limiter; the nearest is -t 1, one message at a time"},
    UnsupportedFlag{"--report-both", "the two directions are in --json FILE"},
    UnsupportedFlag{"--reversed", "run the client on the other side, or use read_bw"},
    UnsupportedFlag{"--wait_destroy", "leave it out"},
    UnsupportedFlag{"--pin_cores --numa_node --disable_numa",
                    "run it under `numactl` or `taskset`"},
    UnsupportedFlag{"--data_validation_debug",
                    "data are verified by default; --no_verify ends that"},
    UnsupportedFlag{
        "-B --source_mac -E --dest_mac -G --use_rss -J --dest_ip -j --source_ip -K "
        "--dest_port -k --source_port -Y --ethertype -Z --server -P --client -v --mac_fwd "
        "--vlan_en --vlan_pcp --flows --flows_burst --promiscuous --reply_every --sniffer "
        "--tcp --raw_mcast --remote_mac --local_mac --remote_ip --local_ip --remote_port "
        "--local_port",
        "there are no raw Ethernet tests; the nearest are send_bw and send_lat"},
    UnsupportedFlag{
        "--aes_xts --encrypt_on_tx --sig_before --aes_block_size --data_enc_keys_number "
        "--kek_path --credentials_path --data_enc_key_app_path --sig_offload",
        "there is no encryption or signature offload; leave it out"},
};

bool names(std::string_view flags, std::string_view flag) {
  while (!flags.empty()) {
    const size_t end = std::min(flags.find(' '), flags.size());
    std::string_view name = flags.substr(0, end);
    flags.remove_prefix(std::min(end + 1, flags.size()));
    if (name == flag) return true;
    if (name.back() != '*') continue;
    name.remove_suffix(1);
    if (flag.substr(0, name.size()) == name) return true;
  }
  return false;
}

}  // namespace

std::string instead_of(const std::string& flag) {
  const bool is_long = flag.size() > 2 && flag[1] == '-';
  const std::string name =
      is_long ? flag.substr(0, flag.find('=')) : flag.substr(0, std::min<size_t>(2, flag.size()));
  for (const UnsupportedFlag& foreign : kUnsupported) {
    if (names(foreign.flags, name)) return foreign.instead;
  }
  return "";
}

}  // namespace baton::bench
