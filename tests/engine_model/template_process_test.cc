// The process that renders templates: transformers' semantics, its limits, its deaths.
#include "engine/tokenizer/chat_template.h"

#include <signal.h>

#include "tests/fails_with.h"
#include "tests/sanitized.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/until.h"
#include "transport/base/limits/memory_left.h"

namespace baton::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

constexpr char kForEver[] =
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}";

std::string file(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

int files_of(const std::string& process) {
  const std::filesystem::directory_iterator open(absl::StrCat("/proc/", process, "/fd"));
  return static_cast<int>(std::distance(begin(open), end(open)));
}

std::string said(TemplateProcess& process, std::string_view source) {
  const auto text = process.render(source, Json{{"m", {{"role", "user"}, {"content", "é"}}}});
  return text.ok() ? *text : absl::StrCat("error: ", text.status().message());
}

TEST(TemplateProcess, RendersAsTransformersDoes) {
  TemplateProcess process;
  for (
      const auto& [source, text] : std::vector<std::pair<const char*, const char*>>{
          {"a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"},
          {"{{ m | tojson }}", R"({"role": "user", "content": "é"})"},
          {"{{ {'b': '<&>', 'a': [1, 2.0, none, true]} | tojson }}",
           R"({"b": "<&>", "a": [1, 2.0, null, true]})"},
          {"{{ [1] | tojson(indent=2) }}", "[\n  1\n]"},
          {"{{ 'é' | tojson(ensure_ascii=true) }}", R"("\u00e9")"},
          {"{% generation %}x{% endgeneration %}", "x"},
          {"{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break "
           "%}{% endif %}{{ i }}{% endfor %}",
           "02"},
          {"[{{ '\u3000 x\u3000'.strip() }}]", "[x]"},
          {"{{ '\\N{BULLET}\\u00e9' }}", "•é"},
          {"{{ strftime_now('%Y') | length }}", "4"},
          {"{% set ns = namespace(n=1) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor "
           "%}{{ ns.n }}",
           "4"},
          {"{{ nothing }}{{ m.nothing }}", ""},
          {"{{ raise_exception('no such role') }}", "error: no such role"},
          {"\n{{ m.x.y }}", "error: line 2: UndefinedError: 'dict object' has no attribute 'x'"}}) {
    EXPECT_EQ(said(process, source), text) << source;
  }
}

TEST(TemplateProcess, KeepsTemplatesInTheirSandbox) {
  TemplateProcess process;
  for (const char* source : {"{{ ''.__class__.__mro__ }}", "{{ raise_exception.__code__.co_code }}",
                             "{{ '{0.__class__.__mro__}'.format(m) }}", "{{ [1].append(2) }}",
                             "{{ namespace(_a=1) }}"}) {
    EXPECT_THAT(said(process, source), HasSubstr("SecurityError")) << source;
  }
  // Nor does one that breaks out find anything.
  const std::string of = absl::StrCat(process.pid());
  EXPECT_EQ(files_of(of), 3);
  EXPECT_THAT(file(absl::StrCat("/proc/", of, "/status")),
              HasSubstr("NoNewPrivs:\t1\nSeccomp:\t2\n"));
  EXPECT_THAT(file(absl::StrCat("/proc/", of, "/limits")),
              AllOf(HasSubstr("Max address space         536870912            536870912"),
                    HasSubstr("Max open files            0                    0")));
  EXPECT_EQ(file(absl::StrCat("/proc/", of, "/environ")).find("HOME="), std::string::npos);
}

TEST(TemplateProcess, NamesWhatIsWrongWithATemplateAndItsLine) {
  TemplateProcess process;
  for (const auto& [source, why] : std::vector<std::pair<const char*, const char*>>{
           {"{% for %}", "line 1: "},
           {"\n\n{{ 'a }}", "line 3: "},
           {"\n{% nosuch %}", "line 2: Encountered unknown tag 'nosuch'"},
           {"{{ x is nosuch }}", "line 1: No test named 'nosuch'"}}) {
    EXPECT_THAT(process.compile(source), fails_with(Code::kInvalidArgument, {why}));
  }
  EXPECT_EQ(process.compile("{{ x }}"), absl::OkStatus());
}

TEST(TemplateProcess, LimitsTimeAndMemoryAndGoesOn) {
  TemplateProcess quick({.compute = std::chrono::seconds(1)});
  EXPECT_EQ(said(quick, kForEver), "error: it computes for more than 1 s");
  EXPECT_EQ(said(quick, "x"), "x");
  TemplateProcess process({.compute = std::chrono::seconds(60)});
  for (const char* source : {"{{ 'x' * 10**10 }}",
                             "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = "
                             "ns.x ~ ns.x %}{% endfor %}"}) {
    EXPECT_THAT(said(process, source),
                testing::ContainsRegex("error: it needs more than [0-9]+ MiB"));
    EXPECT_EQ(said(process, "x"), "x");
  }
  for (int times = 0; times < 3; ++times) {  // what one chat asks for costs no other chat its turn
    EXPECT_THAT(said(process, "{{ m.role * 17500001 }}"), HasSubstr("it writes 70000004 bytes"));
  }
  EXPECT_EQ(said(process, "x"), "x");
  EXPECT_LT(said(process, "{{ raise_exception('x' * 10**7) }}").size(), 5000u);
  EXPECT_THAT(said(process, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
              HasSubstr("RecursionError"));
}

// Questions about memory count what the process may still take.
TEST(TemplateProcess, HasAShareOfTheMemoryThatIsLeft) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() + "/proc");
  std::ofstream(folder.path() + "/proc/meminfo") << "MemAvailable: 4194304 kB\n";
  base::look_for_memory_below(folder.path());
  constexpr size_t kAll = size_t{4} << 30, kShare = kAll / 16;
  {
    TemplateProcess process;
    EXPECT_EQ(said(process, "x"), "x");
    EXPECT_LT(base::memory_left().bytes, kAll - kShare / 2);
    EXPECT_GE(base::memory_left().bytes, kAll - kShare);
    EXPECT_EQ(said(process, "{{ 'x' * 10**10 }}"), "error: it needs more than 256 MiB of memory");
    kill(process.pid(), SIGKILL);
    EXPECT_EQ(said(process, "x"), "x");
    EXPECT_GE(base::memory_left().bytes, kAll - kShare) << "its predecessor's is counted too";
  }
  EXPECT_EQ(base::memory_left().bytes, kAll);
  base::look_for_memory_below("");
}

// A limit of the shell's that may not be raised is kept, and named where it leaves too little.
TEST(TemplateProcess, KeepsToALimitOfAddressSpace) {
  const TemporaryFolder folder;
  const auto python = [&](int kib) {
    const std::string path = absl::StrCat(folder.path(), "/python", kib);
    std::ofstream(path) << "#!/bin/sh\nulimit -v " << kib
                        << "\nif [ $(id -u) = 0 ]; then drop='setpriv --bounding-set=-all "
                           "--inh-caps=-all'; fi\nexec $drop /usr/bin/python3 \"$@\"\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  };
  TemplateProcess process({.pythons = {python(200'000)}});
  EXPECT_EQ(said(process, "x"), "x");
  EXPECT_THAT(said(process, "{{ 'x' * 10**9 }}"), HasSubstr("MiB of memory"));
  if (kSanitized) return;  // maps terabytes
  TemplateProcess small({.pythons = {python(5'000)}});
  EXPECT_THAT(said(small, "x"), testing::Not(HasSubstr("ulimit")));
  rlimit before{}, limit{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  limit = {rlim_t{1} << 40, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  EXPECT_THAT(said(small, "x"), HasSubstr("`ulimit -v` leaves it 1099511627776 bytes"));
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
}

TEST(TemplateProcess, ReplacesAProcessThatIsKilled) {
  TemplateProcess process;
  EXPECT_EQ(said(process, "x"), "x");
  const pid_t first = process.pid();
  kill(first, SIGKILL);
  EXPECT_EQ(said(process, "y"), "y");
  EXPECT_NE(process.pid(), first);
  EXPECT_EQ(kill(first, 0), -1) << "the dead one is not reaped";
}

TEST(TemplateProcess, StartsAnewWhereItIsKilledAtItsStart) {
  const TemporaryFolder folder;
  const std::string python = folder.path("python");
  std::ofstream(python) << "#!/bin/sh\nmkdir " << folder.path("once")
                        << " 2>/dev/null && kill -9 $$\nexec /usr/bin/python3 \"$@\"\n";
  std::filesystem::permissions(python, std::filesystem::perms::owner_all);
  TemplateProcess process({.pythons = {python}});
  EXPECT_EQ(said(process, "x"), "x");
}

TEST(TemplateProcess, KillsAProcessThatDoesNotAnswer) {
  TemplateProcess process({.patience = std::chrono::seconds(1)});
  until([&] { return said(process, "x") == "x"; });
  const pid_t first = process.pid();
  kill(first, SIGSTOP);
  EXPECT_THAT(said(process, "x"), HasSubstr("does not answer"));
  EXPECT_EQ(kill(first, 0), -1);
  until([&] { return said(process, "x") == "x"; });
}

TEST(TemplateProcess, ServesThreadsAndLeavesNothing) {
  const int before = files_of("self");
  auto process = TemplateProcess::shared();
  EXPECT_EQ(process, TemplateProcess::shared());
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        const std::string text = absl::StrCat(t, " ", i, std::string(10000, 'a'));
        EXPECT_EQ(*process->render("{{ x }}", {{"x", text}}), text);
        if (t != 0 || i != 10) continue;
        const pid_t pid = process->pid();
        ASSERT_GT(pid, 0);
        kill(pid, SIGKILL);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const pid_t pid = process->pid();
  EXPECT_EQ(kill(pid, 0), 0);
  process.reset();
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_EQ(files_of("self"), before);
}

TEST(TemplateProcess, TakesTheFirstPythonThatHasJinja2OrSaysWhatToInstall) {
  TemplateProcess second(
      {.pythons = {"/nowhere/python3", "/bin/false", "/usr/bin/python3", "python3"}});
  EXPECT_EQ(said(second, "x"), "x");
  TemplateProcess none({.pythons = {"/nowhere/python3", "/bin/false"}});
  EXPECT_THAT(none.compile("x"),
              fails_with(Code::kFailedPrecondition,
                         {"install Debian's python3-jinja2", "/nowhere/python3: "}));
  EXPECT_EQ(none.pid(), 0);
}

}  // namespace
}  // namespace baton::engine
