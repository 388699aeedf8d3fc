// What the backend tells the Python side: launches, copies and waits at once, all else through a log.
#pragma once
#include <c10/core/Stream.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace simulated {

constexpr c10::DeviceType SIM = c10::DeviceType::PrivateUse1;

// ---- host threads ----
// Autograd runs a backward in threads of its own, with the debug information of the thread that called it. So the
// launches of these threads count as the caller's.
struct HostThread final : c10::DebugInfoBase {
  unsigned long ident = PyThread_get_thread_ident();
  PyThreadState* state = PyGILState_GetThisThreadState();
};
constexpr auto HOST_THREAD = [] { return c10::DebugInfoKind::TEST_INFO; };

inline unsigned long host_thread() {
  if (auto* info = c10::ThreadLocalDebugInfo::get(HOST_THREAD())) return static_cast<HostThread*>(info)->ident;
  auto thread = std::make_shared<HostThread>();
  c10::ThreadLocalDebugInfo::_push(HOST_THREAD(), thread);
  return thread->ident;
}

// ---- places in Python code ----
// A place is the innermost frames outside torch, kept as code objects and offsets. Equal places have one number.
constexpr int FRAMES = 3;
using Place = std::array<std::pair<PyCodeObject*, int>, FRAMES>;

struct PlaceHash {
  size_t operator()(const Place& place) const {
    size_t hash = 0;
    for (auto [code, offset] : place) hash = hash * 1000003 ^ reinterpret_cast<size_t>(code) ^ offset;
    return hash;
  }
};

inline std::vector<std::string> hidden_folders;
inline std::unordered_map<PyCodeObject*, bool> shown_code;  // holds a reference to each key
inline std::unordered_map<Place, int, PlaceHash> place_numbers;
inline std::vector<Place> places;

inline bool is_shown(PyCodeObject* code) {
  auto [found, added] = shown_code.try_emplace(code, true);
  if (added) {
    Py_INCREF(code);
    const std::string file = py::cast<std::string>(py::handle(code->co_filename));
    for (const auto& folder : hidden_folders) found->second &= file.find(folder) == std::string::npos;
  }
  return found->second;
}

inline PyFrameObject* innermost_frame() {  // a new reference
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  if (frame) return frame;
  auto* info = c10::ThreadLocalDebugInfo::get(HOST_THREAD());  // the thread that waits for this thread's backward
  PyThreadState* state = info ? static_cast<HostThread*>(info)->state : nullptr;
  return state ? PyThreadState_GetFrame(state) : nullptr;
}

inline int place_here() {  // needs the GIL
  Place place{};
  int count = 0;
  PyFrameObject* frame = innermost_frame();
  while (frame && count < FRAMES) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (is_shown(code)) place[count++] = {code, PyFrame_GetLasti(frame)};
    Py_DECREF(code);
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  Py_XDECREF(frame);
  auto [found, added] = place_numbers.try_emplace(place, static_cast<int>(places.size()));
  if (added) places.push_back(place);
  return found->second;
}

inline py::list frames_of(int number) {
  py::list frames;
  for (auto [code, offset] : places.at(number))
    if (code) frames.append(py::make_tuple(py::handle(code->co_filename), PyCode_Addr2Line(code, offset)));
  return frames;
}

// ---- the log ----
// Allocations, frees, events and waits need neither an answer nor a place, so they take no GIL. The observer takes the
// log before it reads anything else.
struct Entry {
  const char* what;
  unsigned long thread;
  std::array<int64_t, 3> values;
};
inline std::mutex log_lock;
inline std::vector<Entry> entries;

inline void note(const char* what, int64_t first, int64_t second = 0, int64_t third = 0) {
  const Entry entry{what, host_thread(), {first, second, third}};
  std::lock_guard<std::mutex> guard(log_lock);
  entries.push_back(entry);
}

inline py::list take_log() {
  std::vector<Entry> taken;
  {
    std::lock_guard<std::mutex> guard(log_lock);
    taken.swap(entries);
  }
  static std::unordered_map<const char*, py::str>* names = new std::unordered_map<const char*, py::str>();
  py::list out(taken.size());
  for (size_t i = 0; i < taken.size(); ++i) {
    const Entry& entry = taken[i];
    const auto name = names->try_emplace(entry.what, entry.what).first->second;
    out[i] = py::make_tuple(name, entry.thread, entry.values[0], entry.values[1], entry.values[2]);
  }
  return out;
}

// ---- the observer ----
inline py::object* observer = nullptr;  // lives as long as the process
inline bool observed() { return observer && Py_IsInitialized(); }

struct Methods {
  py::object launch, copied, host_access, stream_synchronized, event_synchronized, device_synchronized, event_done,
      elapsed_ms;
};
inline Methods* methods = nullptr;

inline void observe_with(py::object object) {
  observer = new py::object(std::move(object));
  auto get = [](const char* name) { return observer->attr(name); };
  methods = new Methods{get("launch"), get("copied"), get("host_access"), get("stream_synchronized"),
                        get("event_synchronized"), get("device_synchronized"), get("event_done"), get("elapsed_ms")};
}

inline int64_t key(const c10::Stream& stream) { return (int64_t{stream.device_index()} << 40) | stream.id(); }

}  // namespace simulated
