// The library itself: what it shows, that it needs no CUDA, and that the installed NCCL opens it.
#include <dlfcn.h>

#include "tests/nccl_net/rig.h"

namespace baton::nccl {
namespace {

std::string output_of(const std::string& command) {
  std::string out;
  FILE* const pipe = popen((command + " 2>&1").c_str(), "r");
  char text[4096];
  while (pipe != nullptr && fgets(text, sizeof text, pipe) != nullptr) out += text;
  if (pipe != nullptr) pclose(pipe);
  return out;
}

// Promise(nccl): The library shows NCCL's doors and nothing else, and links no CUDA | its dynamic
//   symbols and needed libraries are read
TEST(NcclLibrary, ShowsNothingButItsDoors) {
  std::set<std::string> shown;
  std::istringstream lines(output_of("nm -D --defined-only " BATON_NCCL_PLUGIN));
  for (std::string line; std::getline(lines, line);) {
    shown.insert(line.substr(line.rfind(' ') + 1));
  }
  if (shown.empty()) GTEST_SKIP() << "nm is not installed: apt-get install binutils";
  for (const std::string& symbol : shown) {
    EXPECT_THAT(symbol, testing::MatchesRegex("nccl[A-Za-z]+_v[0-9]+"));
  }
  for (int version = 8; version <= 12; ++version) {
    EXPECT_THAT(shown, testing::Contains(absl::StrCat("ncclNetPlugin_v", version)));
    EXPECT_THAT(shown, testing::Contains(absl::StrCat("ncclCollNetPlugin_v", version)));
  }
  EXPECT_THAT(shown, testing::IsSupersetOf({"ncclEnvPlugin_v1", "ncclEnvPlugin_v2"}));
  const std::string needed = output_of("readelf -d " BATON_NCCL_PLUGIN);
  EXPECT_THAT(needed, testing::Not(testing::HasSubstr("libcuda")));
  EXPECT_THAT(needed, testing::Not(testing::HasSubstr("libnccl.so")));
}

TEST(NcclLibrary, HasNoVersionThatNcclDoesNotKnow) {
  EXPECT_FALSE(AnyNet::load(BATON_NCCL_PLUGIN, 7).ok());
  EXPECT_FALSE(AnyNet::load(BATON_NCCL_PLUGIN, 13).ok());
}

// CollNet: every version answers that there is no device, and has no function that NCCL would call.
TEST(NcclLibrary, ReducesNothingInTheNetwork) {
  void* const library = dlopen(BATON_NCCL_PLUGIN, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  for (int version = 8; version <= 12; ++version) {
    struct Head {
      const char* name;
      void* init;
      Devices devices;
    };
    const auto* const table = static_cast<const Head*>(
        dlsym(library, absl::StrCat("ncclCollNetPlugin_v", version).c_str()));
    ASSERT_NE(table, nullptr);
    EXPECT_STREQ(table->name, "Baton");
    int count = -1;
    EXPECT_EQ(table->devices(&count), Result::kSuccess);
    EXPECT_EQ(count, 0);
  }
}

std::string installed_nccl() {
  std::vector<std::string> places = {"libnccl.so.2"};
  for (const char* root : {"/usr/local/cuda/lib", "/usr/local/cuda/lib64",
                           "/usr/local/cuda-13.0/lib", "/usr/local/cuda-13.0/lib64"}) {
    places.push_back(std::string(root) + "/libnccl.so.2");
  }
  if (const char* named = std::getenv("NCCL_UNDER_TEST"); named != nullptr) places = {named};
  for (const std::string& place : places) {
    if (void* const found = dlopen(place.c_str(), RTLD_LAZY | RTLD_LOCAL); found != nullptr) {
      dlclose(found);
      return place;
    }
  }
  return "";
}

// Promise(nccl): The installed NCCL opens the library as its environment | ncclGetUniqueId, which
//   needs no GPU, in a process of its own; what NCCL logs is read
TEST(NcclLibrary, TheInstalledNcclOpensItsEnvironment) {
  const std::string nccl = installed_nccl();
  if (nccl.empty()) {
    GTEST_SKIP()
        << "no libnccl.so.2: it comes with CUDA's toolkit and torch, and the newest by `python3 -m "
           "venv build/venv/nccl && build/venv/nccl/bin/pip install nvidia-nccl-cu13`; "
           "NCCL_UNDER_TEST=path names one";
  }
  const std::string said = output_of("NCCL_ENV_PLUGIN=" BATON_NCCL_PLUGIN
                                     " NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=ALL /proc/" +
                                     std::to_string(getpid()) + "/exe --unique-id=" + nccl);
  EXPECT_THAT(said, testing::HasSubstr("unique id: 0"));
  EXPECT_THAT(said, testing::HasSubstr("Successfully loaded external env plugin"));
  EXPECT_THAT(said, testing::HasSubstr("libnccl-net-baton.so"));
}

int unique_id(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return 1;
  auto* const get = reinterpret_cast<int (*)(void*)>(dlsym(library, "ncclGetUniqueId"));
  if (get == nullptr) return 1;
  std::array<char, 128> id{};
  const int result = get(id.data());
  std::printf("unique id: %d\n", result);
  return result;
}

}  // namespace
}  // namespace baton::nccl

int main(int argc, char** argv) {
  constexpr std::string_view kUniqueId = "--unique-id=";
  if (argc == 2 && std::string_view(argv[1]).starts_with(kUniqueId)) {
    return baton::nccl::unique_id(argv[1] + kUniqueId.size());
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
