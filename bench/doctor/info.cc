// `baton info`: collects what this machine has, prints it, reads the command line.
#include "bench/doctor/info.h"

#include <iostream>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/report/report.h"
#include "engine/command_line/command_line.h"
#include "engine/command_line/worker_flags.h"
#include "gpudirect/facts.h"

namespace baton::bench {
namespace {

// A value for people.
std::string plain(const Json& json) {
  if (json.is_null()) return "-";
  return json.is_string() ? json.get<std::string>() : json.dump();
}

std::string bytes_or(const Json& json, const char* none) {
  return json.is_number() ? human_bytes(json.get<size_t>()) : none;
}

void heading(std::string& out, const char* title) { absl::StrAppend(&out, "\n", title, "\n"); }

void devices_text(std::string& out, const Json& devices) {
  heading(out, "RDMA devices");
  if (devices.empty()) {
    absl::StrAppend(&out, "  none (`baton doctor --provider verbs` tells how to get one)\n");
  }
  for (const Json& device : devices) {
    absl::StrAppend(&out, absl::StrFormat("  %s  PCI %s, NUMA node %s, firmware %s\n",
                                          plain(device["name"]), plain(device["pci"]),
                                          plain(device["numa_node"]), plain(device["firmware"])));
    for (const Json& port : device["ports"]) {
      absl::StrAppend(&out, absl::StrFormat("    port %s: %s, %s, %s", plain(port["number"]),
                                            plain(port["state"]), plain(port["link_layer"]),
                                            plain(port["rate"])));
      if (port.contains("netdev")) absl::StrAppend(&out, ", ", plain(port["netdev"]));
      if (port.contains("mtu")) {
        absl::StrAppend(&out, absl::StrFormat(", MTU %s (of %s)", plain(port["mtu"]),
                                              plain(port["netdev_mtu"])));
      }
      absl::StrAppend(&out, "\n");
      for (const Json& gid : port["gids"]) {
        absl::StrAppend(
            &out, absl::StrFormat("      GID %-3s %s  %s  %s\n", plain(gid["index"]),
                                  plain(gid["gid"]), plain(gid["type"]), plain(gid["netdev"])));
      }
      for (const auto& [name, value] : port["counters"].items()) {
        absl::StrAppend(&out, absl::StrFormat("      %s = %s\n", name, plain(value)));
      }
    }
  }
}

void cuda_text(std::string& out, const Json& cuda) {
  if (cuda.is_null()) return;
  for (const Json& device : cuda["devices"]) {
    absl::StrAppend(
        &out, absl::StrFormat("  CUDA %s, device %s: %s, PCI %s, %s\n   ", plain(cuda["driver"]),
                              plain(device["ordinal"]), plain(device["name"]), plain(device["pci"]),
                              human_bytes(device["memory_bytes"].get<size_t>())));
    for (const gpudirect::FactName& fact : gpudirect::kFactNames) {
      const Json& value = device[fact.name];
      absl::StrAppend(&out, " ", fact.name, " ", value.is_null() ? "unknown" : value.dump());
    }
    const std::string why =
        (device["path"] == "staged" ? device["why_staged"] : device["why_no_dma_buf"])
            .get<std::string>();
    absl::StrAppend(&out, "\n    over adapters: ", plain(device["path"]), why.empty() ? "" : ", ",
                    why, "; their writes are ", plain(device["writes_of_adapters"]), "\n");
  }
  if (const auto& why = cuda["why"].get<std::string>(); !why.empty()) {
    absl::StrAppend(&out, "  ", why, "\n");
  }
}

void gpus_text(std::string& out, const Json& info) {
  heading(out, "GPUs");
  const Json& nvidia = info["nvidia"];
  if (info["gpus"].empty()) absl::StrAppend(&out, "  none\n");
  for (const Json& gpu : info["gpus"]) {
    absl::StrAppend(
        &out,
        absl::StrFormat("  PCI %s, NUMA node %s, kernel driver %s\n", plain(gpu["pci"]),
                        plain(gpu["numa_node"]), plain(gpu["driver"])),
        absl::StrFormat("    link %s now, %s at best, BAR1 %s, IOMMU %s%s\n", plain(gpu["link"]),
                        plain(gpu["best_link"]), bytes_or(gpu["bar1_bytes"], "-"),
                        plain(gpu["iommu"]),
                        info["kernel"]["virtual"].get<bool>() ? ", in a virtual machine" : ""));
  }
  if (!nvidia["driver"].is_null()) {
    absl::StrAppend(&out, absl::StrFormat("  NVIDIA driver %s (%s kernel module), peermem %s\n",
                                          plain(nvidia["driver"]),
                                          nvidia["open_module"].get<bool>() ? "open" : "closed",
                                          nvidia["peermem"].get<bool>() ? "loaded" : "not loaded"));
  }
  cuda_text(out, info["cuda"]);
  for (const Json& pair : info["distances"]) {
    absl::StrAppend(&out, absl::StrFormat("  %s to %s: %s\n", plain(pair["rdma"]),
                                          plain(pair["gpu"]), plain(pair["distance"])));
  }
}

}  // namespace

Json collect_info(const SystemRoot& root, Json providers, Json cuda) {
  Json info;
  info["baton"] = BATON_VERSION;
  info["kernel"] = kernel_info(root);
  info["providers"] = std::move(providers);
  info["rdma_devices"] = rdma_devices(root);
  info["gpus"] = gpus(root);
  info["nvidia"] = nvidia_info(root);
  info["cuda"] = std::move(cuda);
  info["distances"] = distances(root, info["rdma_devices"], info["gpus"]);
  info["limits"] = limits_info(root);
  info["memory"] = memory_info(root);
  info["network"] = network_info(root);
  info["numa"] = numa_info(root);
  return info;
}

Json machine_info(const std::string& folder) {
  return collect_info(SystemRoot(folder), probe_providers(),
                      folder.empty() ? cuda_info(gpudirect::machine_driver()) : Json());
}

std::string info_text(const Json& info) {
  std::string out = absl::StrFormat("baton %s on Linux %s\n", plain(info["baton"]),
                                    plain(info["kernel"]["release"]));
  heading(out, "Providers (the best one that reaches a peer is used)");
  for (const Json& provider : info["providers"]) {
    absl::StrAppend(&out, absl::StrFormat("  %-6s %-8s %s\n", plain(provider["name"]),
                                          provider["usable"].get<bool>() ? "usable" : "no",
                                          plain(provider["detail"])));
  }
  devices_text(out, info["rdma_devices"]);
  gpus_text(out, info);
  heading(out, "Limits");
  const Json& limits = info["limits"];
  absl::StrAppend(&out, "  locked memory  ", bytes_or(limits["memlock"]["soft"], "unlimited"),
                  limits["ipc_lock"].get<bool>() ? " (but CAP_IPC_LOCK: none)\n" : "\n",
                  "  open files     ", plain(limits["open_files"]["soft"]), "\n",
                  "  cgroup memory  ", bytes_or(limits["cgroup_memory"], "no limit"), "\n");
  heading(out, "Memory");
  for (const Json& size : info["memory"]["huge_pages"]) {
    absl::StrAppend(&out, absl::StrFormat("  huge pages     %s: %s free of %s\n",
                                          human_bytes(size["kib"].get<size_t>() * 1024),
                                          plain(size["free"]), plain(size["total"])));
  }
  absl::StrAppend(&out, "  transparent    ", plain(info["memory"]["transparent"]),
                  ", shared memory ", plain(info["memory"]["transparent_shmem"]), "\n");
  for (const Json& node : info["numa"]) {
    absl::StrAppend(
        &out, absl::StrFormat("  NUMA node %s    CPUs %s, distances %s\n", plain(node["node"]),
                              plain(node["cpus"]), plain(node["distances"])));
  }
  heading(out, "Kernel");
  const Json& kernel = info["kernel"];
  std::vector<std::string> modules;
  for (const auto& [name, state] : kernel["modules"].items()) {
    if (state != "missing") modules.push_back(absl::StrCat(name, " ", plain(state)));
  }
  absl::StrAppend(&out, "  modules        ",
                  modules.empty() ? "none of interest" : absl::StrJoin(modules, ", "), "\n");
  absl::StrAppend(&out, "  TCP            ", plain(info["network"]["congestion"]), " of ",
                  plain(info["network"]["available"]), "\n");
  return out;
}

int parse_info(int argc, const char* const* argv, bool doctor, InfoOptions& options) {
  const std::string name = doctor ? "baton doctor" : "baton info";
  CLI::App app(doctor ? "Checks this machine, and says how to fix what is wrong."
                      : "Shows what this machine has and which providers can be used.");
  if (doctor) {
    engine::command_line::add_provider(
        app, options.provider, "fail if this provider cannot be used (default: if none can)");
    app.footer("Exit status: 0, or 1 when a check fails that matters for what was asked.");
  }
  if (!doctor) {
    auto* settings = app.add_flag("--settings", options.settings,
                                  "list settings and environment variables only");
    app.add_flag("--markdown", options.markdown, "these as docs/settings.md")->needs(settings);
  }
  auto* json = app.add_option("--json", options.file, "as JSON, to standard output or a file")
                   ->check(engine::command_line::writable_file())
                   ->type_name("[FILE]")
                   ->expected(0, 1);
  app.add_option("--root", options.root, "read /proc and /sys below this folder")
      ->type_name("DIR")
      ->check(engine::command_line::readable_folder());
  if (const int leave = engine::command_line::parse(app, name, argc, argv); leave >= 0) {
    return leave;
  }
  options.json = json->count() > 0;
  return -1;
}

absl::Status print_json(const InfoOptions& options, const Json& json) {
  const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (!options.file.empty()) return write_text(options.file, text, "--json");
  std::cout << text << std::flush;
  return absl::OkStatus();
}

int info_main(int argc, char** argv) {
  InfoOptions options;
  if (const int leave = parse_info(argc, argv, false, options); leave >= 0) return leave;
  const Json info = options.settings ? settings_info() : machine_info(options.root);
  if (!options.json) {
    std::cout << (options.markdown   ? settings_markdown(info)
                  : options.settings ? settings_text(info)
                                     : info_text(info))
              << std::flush;
    return 0;
  }
  const absl::Status status = print_json(options, info);
  if (status.ok()) return 0;
  std::cerr << "baton info: " << status.message() << "\n";
  return 1;
}

}  // namespace baton::bench
