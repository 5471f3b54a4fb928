// Flags for workers, checked one by one as they are read.
#include "engine/command_line/worker_flags.h"

#include <algorithm>
#include <iostream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "transport/decorators.h"
#include "transport/identity.h"
#include "transport/provider.h"

namespace baton::engine::command_line {
namespace {

// Turns a check that returns a status into a CLI11 validator.
CLI::Validator by_status(absl::Status (*check)(const std::string& text)) {
  return {[check](std::string& text) { return std::string(check(text).message()); }, ""};
}

absl::Status is_provider(const std::string& name) { return check_provider(name); }

absl::Status is_setting(const std::string& text) {
  SettingValues one;
  if (absl::Status status = add_setting(text, one); !status.ok()) return status;
  return check_settings(one);
}

absl::Status is_key_file(const std::string& path) {
  return path.empty() ? absl::OkStatus() : ClusterKey::from_file(path).status();
}

absl::Status is_link(const std::string& text) { return LinkShape::parse(text).status(); }

std::string provider_of(const std::string& setting) { return setting.substr(0, setting.find('.')); }

}  // namespace

CLI::Option* add_providers(CLI::App& app, std::vector<std::string>& providers) {
  return app
      .add_option("--provider", providers,
                  "use these transports only, such as shm,tcp (default: all that are available, "
                  "except ucx)")
      ->delimiter(',')
      ->check(by_status(is_provider))
      ->type_name("NAME[,NAME]")
      ->allow_extra_args(false);
}

CLI::Option* add_provider(CLI::App& app, std::string& provider, const std::string& text) {
  return app.add_option("--provider", provider, text)
      ->check(by_status(is_provider))
      ->type_name("NAME");
}

CLI::Option* add_settings(CLI::App& app, SettingValues& settings) {
  return app
      .add_option_function<std::vector<std::string>>(
          "--set",
          [&settings](const std::vector<std::string>& given) {
            for (const std::string& text : given) add_setting(text, settings).IgnoreError();
          },
          "a setting (`baton info --settings` lists them); may be repeated")
      ->check(by_status(is_setting))
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

CLI::Option* add_advertise(CLI::App& app, const char* name, std::string& advertise) {
  return app
      .add_option(name, advertise,
                  "address where peers reach this side, if it is not an address of this machine "
                  "(NAT, a published port)")
      ->type_name("HOST[:PORT]");
}

CLI::Option* add_key_file(CLI::App& app, std::string& file) {
  return app
      .add_option("--key-file", file, "file with the cluster's key (default: this user's own)")
      ->check(by_status(is_key_file))
      ->type_name("FILE");
}

CLI::Option* add_link(CLI::App& app, std::string& link) {
  return app.add_option("--link", link, "simulate this link, such as 40MB/s,200us")
      ->check(by_status(is_link))
      ->type_name("SHAPE");
}

void tell_idle_settings(const std::string& command, const SettingValues& settings,
                        const std::vector<std::string>& providers) {
  if (providers.empty()) return;
  for (const auto& [name, value] : settings) {
    const std::string of = provider_of(name);
    const bool used = std::find(providers.begin(), providers.end(), of) != providers.end();
    if (used || !check_provider(of).ok()) continue;  // peer.* and staging.* apply to all
    std::cerr << command << ": --set " << name << "=" << value << " has no effect: only "
              << absl::StrJoin(providers, ", ") << (providers.size() == 1 ? " is" : " are")
              << " used\n";
  }
}

}  // namespace baton::engine::command_line
