# libtorch is the one inside the torch wheel of the chosen Python.
find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter)
if(NOT Torch_DIR)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c
      "import importlib.util as u,pathlib as p; print(p.Path(u.find_spec('torch').origin).parent/'share/cmake/Torch')"
    OUTPUT_VARIABLE Torch_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
cmake_path(GET Torch_DIR PARENT_PATH torch_root)
cmake_path(GET torch_root PARENT_PATH torch_root)
cmake_path(GET torch_root PARENT_PATH torch_root)
if(NOT kineto_LIBRARY)
  set(kineto_LIBRARY "${torch_root}/lib/libc10.so" CACHE FILEPATH "silences a warning: the wheel has no kineto")
endif()
find_package(Torch 2.13 REQUIRED)

# One clean interface in place of TORCH_LIBRARIES and TORCH_CXX_FLAGS. OpenMP: -fopenmp on the compile line only
# (without it at::parallel_for is silently serial); on the link line the wheel's own libgomp.
add_library(zorro_torch INTERFACE)
target_link_libraries(zorro_torch INTERFACE torch torch_cpu c10 "$<BUILD_INTERFACE:${torch_root}/lib/libgomp.so.1>")
target_compile_options(zorro_torch INTERFACE $<BUILD_INTERFACE:-fopenmp>)
